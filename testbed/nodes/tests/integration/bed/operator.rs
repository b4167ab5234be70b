//! Work of operators on their own machine.

use anyhow::{Context, Result, ensure};
use testbed_lab::{eventually, executable};
use testbed_nodes::Cluster;

use super::TIMEOUT;

/// Exit code, standard output and standard error of `fairlead` with the administrator's kubeconfig file.
pub(crate) fn fairlead(cluster: &Cluster, words: &[&str]) -> Result<(Option<i32>, String, String)> {
    let mut command = cluster.plane_host().command(executable("fairlead")?)?;
    let output = command.args(words).arg("--kubeconfig").arg(cluster.plane().kubeconfig()).output()?;
    let (stdout, stderr) =
        (String::from_utf8(output.stdout)?, String::from_utf8_lossy(&output.stderr).into_owned());
    println!("fairlead {}: {:?}\n{stdout}{stderr}", words.join(" "), output.status.code());
    Ok((output.status.code(), stdout, stderr))
}

/// The API server judges pools a moment after the policy was installed and the other pool was made.
pub(crate) fn overlap_is_refused(cluster: &Cluster, pool: &str) {
    let create = ["create", "--dry-run=server", "-f", "-"];
    let refused = || {
        let error = cluster.plane().kubectl_stdin(&create, pool).err().context("it was accepted")?;
        ensure!(format!("{error:#}").contains("overlaps 10.64.0.0/16 of pool default"), "{error:#}");
        Ok(())
    };
    eventually(TIMEOUT, refused).unwrap();
}
