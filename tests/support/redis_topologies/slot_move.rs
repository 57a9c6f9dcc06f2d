//! A slot on its way from one master to another, held at any point of the way.

use super::cluster::RedisCluster;
use super::wait_for;

/// A slot that is `MIGRATING` at one master and `IMPORTING` at another.
pub(crate) struct SlotMove<'c> {
    cluster: &'c RedisCluster,
    slot: u16,
    from: usize,
    to: usize,
}

impl<'c> SlotMove<'c> {
    pub(super) fn begin(cluster: &'c RedisCluster, slot: u16, to: usize) -> Self {
        let from = cluster.master_of_slot(slot);
        assert_ne!(from, to, "slot {slot} is already there");
        let (source, target) = (cluster.id(from), cluster.id(to));
        cluster.command::<()>(to, &["CLUSTER", "SETSLOT", &slot.to_string(), "IMPORTING", &source]);
        cluster.command::<()>(from, &["CLUSTER", "SETSLOT", &slot.to_string(), "MIGRATING", &target]);
        SlotMove { cluster, slot, from, to }
    }

    /// The master that it leaves.
    pub(crate) fn from(&self) -> usize {
        self.from
    }

    /// The master that it goes to.
    pub(crate) fn to(&self) -> usize {
        self.to
    }

    /// Keys of the slot that have not been moved yet.
    pub(crate) fn keys(&self) -> Vec<String> {
        self.cluster.command(self.from, &["CLUSTER", "GETKEYSINSLOT", &self.slot.to_string(), "100000"])
    }

    /// Moves one key: from now on the former master answers `ASK` for it. With another key of the slot still there, commands
    /// on both are answered `TRYAGAIN`.
    pub(crate) fn move_key(&self, key: &str) {
        // MIGRATE comes from the address that clients come from.
        let port = self.cluster.node(self.to).port().to_string();
        let mut words = vec!["MIGRATE", "127.0.0.1", &port, key, "0", "10000"];
        if let Some(password) = self.cluster.password() {
            words.extend(["AUTH", password]);
        }
        // MIGRATE blocks the server for the moment that it takes; NOKEY when there is none of that name.
        let answer: String = self.cluster.command(self.from, &words);
        assert_eq!(answer, "OK", "{key} of slot {}", self.slot);
    }

    /// Moves all keys that are there now; more may come.
    pub(crate) fn move_keys(&self) {
        for key in self.keys() {
            self.move_key(&key);
        }
    }

    /// Moves what is left and gives the slot to its new master: `MOVED` from now on. Waits until all nodes know.
    pub(crate) fn finish(self) {
        let (slot, target) = (self.slot.to_string(), self.cluster.id(self.to));
        wait_for("the slot is empty", || {
            self.move_keys();
            // The new master first: from then on nobody adds keys to the former one.
            let answer =
                self.cluster.try_command::<()>(self.to, &["CLUSTER", "SETSLOT", &slot, "NODE", &target]);
            answer.map_err(|error| error.to_string())
        });
        let others = self.cluster.masters().into_iter().filter(|&master| master != self.to);
        for master in others {
            self.cluster.command::<()>(master, &["CLUSTER", "SETSLOT", &slot, "NODE", &target]);
        }
        wait_for("all nodes know the slot's new master", || {
            let master = self.cluster.master_of_slot(self.slot);
            if master == self.to { Ok(()) } else { Err(format!("it is node {master}")) }
        });
    }
}
