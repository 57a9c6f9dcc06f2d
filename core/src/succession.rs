//! Whether a found record can have followed a known one (protocol 5, *Evidence*).

use crate::write::Stamp;

/// Whether the record stamped `found` is a successor of the one stamped `own`, or that very one. If not, Redis
/// lost writes: the revision is lower; or the same with a lower live revision; or both are the same and the
/// `writeId` is another. The same revision with a *higher* live revision is another instance's lease-only
/// commit and no loss.
#[must_use]
pub fn is_successor(found: &Stamp, own: &Stamp) -> bool {
    let numbers = |stamp: &Stamp| (stamp.revision, stamp.live_revision);
    if planted!(NeighbourTakenForLoss) && found.revision == own.revision && found.write_id != own.write_id {
        return false;
    }
    numbers(found) > numbers(own) || (numbers(found) == numbers(own) && found.write_id == own.write_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(revision: u64, live_revision: u64, write_id: &str) -> Stamp {
        Stamp { revision, live_revision, write_id: write_id.to_owned() }
    }

    #[test]
    fn tells_a_loss_from_a_neighbours_write() {
        let own = stamp(5, 20, "mine");
        for (found, follows) in [
            (stamp(5, 20, "mine"), true),
            (stamp(6, 21, "other"), true),
            (stamp(5, 21, "other"), true),
            (stamp(5, 20, "other"), false),
            (stamp(5, 19, "other"), false),
            (stamp(4, 30, "other"), false),
        ] {
            assert_eq!(is_successor(&found, &own), follows, "{found:?}");
        }
    }
}
