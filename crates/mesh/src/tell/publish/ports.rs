//! Prediction of the ports that a symmetric NAT chooses, as WireKube publishes it.

use fairlead_api::resources::{PortPrediction, WireKubePeerStatus};
use fairlead_path::NatType;

use crate::apply::report::Report;

/// Prediction from measured ports. That of an earlier program stays where this one has measured nothing yet.
pub(super) fn prediction(report: &Report, present: Option<&WireKubePeerStatus>) -> Option<PortPrediction> {
    if report.translation.nat != NatType::Symmetric {
        return None;
    }
    of(&report.translation.measured_ports).or_else(|| present?.port_prediction.clone())
}

/// `None` without two ports.
fn of(ports: &[u16]) -> Option<PortPrediction> {
    let ports: Vec<i32> = ports.iter().copied().map(i32::from).collect();
    let steps = || ports.iter().zip(ports.iter().skip(1)).map(|(one, next)| next.saturating_sub(*one));
    let count = i32::try_from(steps().count()).ok()?;
    // At most eight numbers of 17 bits.
    let mean = steps().fold(0_i32, i32::saturating_add).checked_div(count)?;
    let jitter = steps().map(|step| step.saturating_sub(mean).saturating_abs()).max()?;
    Some(PortPrediction {
        base_port: ports.last().copied(),
        increment: Some(mean),
        jitter: Some(jitter),
        sample_ports: ports,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tell::publish::tests::report;

    fn published(
        nat: NatType,
        ports: &[u16],
        present: Option<&WireKubePeerStatus>,
    ) -> Option<PortPrediction> {
        let mut report = report(nat, Vec::new());
        report.translation.measured_ports = ports.to_vec();
        prediction(&report, present)
    }

    #[test]
    fn a_sequence_has_its_step_and_random_ports_have_a_great_jitter() {
        let sequence = published(NatType::Symmetric, &[40_000, 40_002, 40_004, 40_008], None).unwrap();
        let PortPrediction { base_port, increment, jitter, sample_ports } = sequence;
        assert_eq!((base_port, increment, jitter), (Some(40_008), Some(2), Some(2)));
        assert_eq!(sample_ports, [40_000, 40_002, 40_004, 40_008]);
        let random = published(NatType::Symmetric, &[50_000, 2_000, 61_000, 30_000], None).unwrap();
        assert!(random.jitter > Some(40_000), "{random:?}");
    }

    #[test]
    fn only_a_symmetric_nat_has_one_and_a_new_program_keeps_it() {
        let ports = [40_000, 40_001, 40_002, 40_003];
        let port_prediction = published(NatType::Symmetric, &ports, None);
        let present = WireKubePeerStatus { port_prediction: port_prediction.clone(), ..Default::default() };
        assert_eq!(published(NatType::Symmetric, &[], Some(&present)), port_prediction);
        for nat in [NatType::Cone, NatType::Open, NatType::PortRestrictedCone, NatType::Unknown] {
            assert_eq!(published(nat, &ports, Some(&present)), None, "{nat:?}");
        }
        assert_eq!(published(NatType::Symmetric, &[], None), None);
    }
}
