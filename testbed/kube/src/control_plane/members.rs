//! A control plane that several machines share, each with an etcd and an API server of its own.

use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, ensure};

use super::{ControlPlane, state_directory};
use crate::programs::Programs;
use crate::{Options, build, kubebed};

/// Programs of each member, in the order in which they need each other.
const PROGRAMS: [&str; 2] = ["etcd", "kube-apiserver"];

/// Machine with an etcd and an API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Name, also that of its etcd.
    pub name: String,
    /// Address at which the other members reach it; one of [`Options::addresses`].
    pub address: IpAddr,
}

impl ControlPlane {
    /// Makes the certificates and kubeconfigs of a control plane whose programs the caller runs, those of
    /// [`ControlPlane::member_programs`] on each member. Nothing runs yet. kubectl asks the API server of the first member.
    ///
    /// # Errors
    /// There are no members, or the programs cannot be built.
    pub fn of_members(options: Options, members: Vec<Member>) -> anyhow::Result<Self> {
        let first = members.first().context("a control plane needs a member")?;
        let binary = build::binary()?;
        let directory = state_directory(&options)?;
        let mut command = options.command(&binary);
        command.args(["member", "credentials"]);
        command.args(arguments(&options, &members, directory.path(), first));
        let output = command.output().with_context(|| format!("cannot run {}", binary.display()))?;
        ensure!(
            output.status.success(),
            "cannot make the credentials of a control plane: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Self::new(directory, Programs::Kubebed(binary), options, members, None)
    }

    /// Names and command lines of the programs that run on a member, which starts them again when they end; `data` is the directory
    /// of its etcd, which outlives them. Controllers and scheduler, if the options ask for them, run on the first member. Empty for a
    /// machine that is no member.
    pub fn member_programs(&self, name: &str, data: &Path) -> Vec<(&'static str, Vec<String>)> {
        let found = self.members.iter().enumerate().find(|(_, member)| member.name == name);
        let (Some((place, member)), Programs::Kubebed(binary)) = (found, &self.programs) else {
            return Vec::new();
        };
        let once = [
            ("kube-controller-manager", self.options.controllers),
            ("kube-scheduler", self.options.scheduler),
        ];
        let once = once.into_iter().filter(|(_, is_wanted)| *is_wanted && place == 0);
        let own = arguments(&self.options, &self.members, self.directory.path(), member);
        let command = |program: &str| {
            let mut command = vec![binary.display().to_string(), "member".to_owned(), program.to_owned()];
            command.extend(own.iter().cloned());
            command.push(format!("-data={}", data.display()));
            command
        };
        let programs = PROGRAMS.into_iter().chain(once.map(|(program, _)| program));
        programs.map(|program| (program, command(program))).collect()
    }
}

/// Flags of each program of the member `own`.
fn arguments(options: &Options, members: &[Member], directory: &Path, own: &Member) -> Vec<String> {
    let mut arguments = vec![format!("-dir={}", directory.display()), format!("-name={}", own.name)];
    arguments.extend(members.iter().map(|member| format!("-member={}={}", member.name, member.address)));
    arguments.extend(kubebed::arguments(options));
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_program_is_told_all_members_and_its_own() {
        let member =
            |name: &str, address: &str| Member { name: name.to_owned(), address: address.parse().unwrap() };
        let members = [member("one", "192.0.2.1"), member("two", "192.0.2.2")];
        let addresses = members.iter().map(|member| member.address).collect();
        let options = Options { addresses, port: Some(6443), ..Options::default() };
        let expected = "-dir=/state -name=two -member=one=192.0.2.1 -member=two=192.0.2.2 -ephemeral -controllers=false \
                        -scheduler=false -port=6443 -address=192.0.2.1 -address=192.0.2.2";
        assert_eq!(arguments(&options, &members, Path::new("/state"), &members[1]).join(" "), expected);
    }
}
