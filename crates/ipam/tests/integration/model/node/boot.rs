//! Records of a node's blocks that outlast its program and end with the boot.

use fairlead_ipam::Block as Own;

use super::{Mistake, Node};

impl Node {
    /// The power goes.
    pub(crate) fn reboot(&mut self) {
        self.kernel.clear();
        self.exported.clear();
        self.recorded.clear();
    }

    /// Blocks that a program uses that starts without the API server.
    pub(super) fn restored(&self) -> Vec<Own> {
        let trusts_file = self.mistake == Some(Mistake::TrustsTheFile);
        let is_shown = |block: &&Own| trusts_file || self.exported.contains(block.name());
        self.recorded.iter().filter(is_shown).cloned().collect()
    }

    /// The block task tells routing daemons and later programs.
    pub(super) fn keep_blocks(&mut self) {
        let Some(program) = &self.program else { return };
        let table = program.state.table();
        self.recorded = table.open_blocks().cloned().collect();
        self.exported = table.kept_blocks().map(|block| block.name().to_owned()).collect();
    }
}
