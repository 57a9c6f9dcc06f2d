//! What the proof that a shard is read to its end says (protocol 6, *Drain*).

/// Whether a shard is proven empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShardProof {
    /// It is: no consumer group has anything to read or to acknowledge on it.
    Empty {
        /// Whether the shard's key exists; one that does not is proven too.
        key_exists: bool,
        /// Pending entries of all groups whose record no longer exists; not in the way.
        ghosts: u64,
    },
    /// It is not, or not yet known to be.
    NotEmpty {
        /// Who waits for what, at least one; groups as Redis lists them, missing ones last.
        waits: Vec<Waiting>,
    },
}

/// What became of the deletion of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShardDeletion {
    /// Proven empty and deleted in the same breath.
    Deleted,
    /// There was no such key.
    Absent,
    /// The call reached the server after the instant it was given: nothing was looked at, nothing deleted.
    TooLate,
    /// Not proven empty, nothing was deleted.
    NotEmpty {
        /// Who waits for what, at least one.
        waits: Vec<Waiting>,
    },
}

/// One consumer group that keeps a shard from being empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The Redis consumer group, coordinated or not; what is no UTF-8 in its name is replaced. Empty for
    /// [`WaitReason::WrongType`].
    pub consumer_group: String,
    /// What it waits for first.
    pub reason: WaitReason,
    /// Records behind the group's last delivered id; for a missing group all records of the stream.
    /// Counted up to 100, or up to 256 KiB of content.
    pub undelivered: u64,
    /// There may be more undelivered ones.
    pub undelivered_is_at_least: bool,
    /// Pending entries whose record exists.
    pub pending: u64,
    /// Not all pending entries were looked at (the first 100 real ones are): some of `pending` may be
    /// ghosts.
    pub pending_is_at_most: bool,
    /// Pending entries whose record no longer exists (deleted or trimmed); 0 if not all were looked at.
    pub ghosts: u64,
    /// The id of the oldest undelivered record, or where `reason` is `Pending`, of the oldest pending one.
    pub oldest_id: Option<String>,
}

/// Why a shard is not proven empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WaitReason {
    /// A coordinated group does not exist on the key; it is to be provisioned again.
    GroupMissing,
    /// Records that were never delivered to the group.
    Undelivered,
    /// Nothing is undelivered, but delivered records are not acknowledged.
    Pending,
    /// The key holds something else than a stream.
    WrongType,
    /// Nothing real is found, but the pending entries are too many and too scattered to look at all.
    PendingUndecided,
}

impl WaitReason {
    /// The name in answers and on the log, e.g. `GROUP_MISSING`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            WaitReason::GroupMissing => "GROUP_MISSING",
            WaitReason::Undelivered => "UNDELIVERED",
            WaitReason::Pending => "PENDING",
            WaitReason::WrongType => "WRONG_TYPE",
            WaitReason::PendingUndecided => "PENDING_UNDECIDED",
        }
    }

    pub(crate) fn of(name: &str) -> Option<Self> {
        [
            WaitReason::GroupMissing,
            WaitReason::Undelivered,
            WaitReason::Pending,
            WaitReason::WrongType,
            WaitReason::PendingUndecided,
        ]
        .into_iter()
        .find(|reason| reason.as_str() == name)
    }
}

impl Waiting {
    /// What is said of a key that holds no stream.
    pub(crate) fn wrong_type() -> Self {
        Waiting {
            consumer_group: String::new(),
            reason: WaitReason::WrongType,
            undelivered: 0,
            undelivered_is_at_least: false,
            pending: 0,
            pending_is_at_most: false,
            ghosts: 0,
            oldest_id: None,
        }
    }
}
