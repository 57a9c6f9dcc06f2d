//! The scripts that do the work on the server, one file each under `src/scripts/`, each with `common.lua`
//! in front of it; those that look into shards have `proof.lua` in between.

use std::sync::LazyLock;

/// One script: its text and the SHA-1 under which the server knows it.
#[derive(Debug)]
pub(super) struct Script {
    /// What metrics and error texts call it.
    pub(super) name: &'static str,
    /// The whole text that the server runs.
    pub(super) source: &'static str,
    /// SHA-1 of the text, in hexadecimal.
    pub(super) sha: String,
}

impl Script {
    fn new(name: &'static str, source: &'static str) -> Self {
        Script { name, source, sha: ::redis::Script::new(source).get_hash().to_owned() }
    }
}

/// Every script there is.
#[derive(Debug)]
pub(super) struct Scripts {
    /// Takes a group's mutex and returns what is stored.
    pub(super) enter: Script,
    /// Writes a group under its mutex.
    pub(super) commit: Script,
    /// Creates a group's key and keeps the mutex.
    pub(super) create: Script,
    /// Deletes a group's key and leaves a tombstone.
    pub(super) delete: Script,
    /// Reads a group without the mutex.
    pub(super) read: Script,
    /// Takes the mutex of a stream prefix.
    pub(super) lock: Script,
    /// Gives a mutex back.
    pub(super) release: Script,
    /// Extends a mutex.
    pub(super) renew: Script,
    /// Proves a shard empty.
    pub(super) prove_empty: Script,
    /// Deletes a shard that it proves empty.
    pub(super) delete_shard: Script,
    /// Shows what a shard's key holds.
    pub(super) view: Script,
    /// Names what the user may not do.
    pub(super) rights: Script,
}

impl Scripts {
    /// All of them, for loading them into a server at once.
    pub(super) fn all(&self) -> [&Script; 12] {
        [
            &self.enter,
            &self.commit,
            &self.create,
            &self.delete,
            &self.read,
            &self.lock,
            &self.release,
            &self.renew,
            &self.prove_empty,
            &self.delete_shard,
            &self.view,
            &self.rights,
        ]
    }
}

macro_rules! script {
    ($name:literal $(, $between:literal)?) => {
        Script::new(
            $name,
            concat!(
                include_str!("../scripts/common.lua"),
                "\n",
                $(include_str!(concat!("../scripts/", $between, ".lua")), "\n",)?
                include_str!(concat!("../scripts/", $name, ".lua"))
            ),
        )
    };
}

/// The scripts, hashed once.
pub(super) static SCRIPTS: LazyLock<Scripts> = LazyLock::new(|| Scripts {
    enter: script!("enter"),
    commit: script!("commit"),
    create: script!("create"),
    delete: script!("delete"),
    read: script!("read"),
    lock: script!("lock"),
    release: script!("release"),
    renew: script!("renew"),
    prove_empty: script!("prove_empty", "proof"),
    delete_shard: script!("delete_shard", "proof"),
    view: script!("view", "proof"),
    rights: script!("rights"),
});
