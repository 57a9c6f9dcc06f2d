//! Every schedule of a small world: two members, two shards, one hand-over, one rollback, over the real core and
//! the real consumer decisions, explored exhaustively.
#![expect(clippy::expect_used, reason = "a test's helpers may fail the test")]

use std::hash::{Hash, Hasher};
use std::time::Duration;

use rsc_client::decision::{Action as Wish, Consumer, Event, Identity, Settings as ClientSettings, Work};
use rsc_core::validate::validate_transition;
use rsc_core::{
    Command, Context, Group, RawFields, Reply, Settings, Stamp, WriteKind, decide, is_successor, lifecycle,
    load,
};
use rsc_protocol::{CapacityReport, GroupKey, HeartbeatRequest, HeartbeatResponse, Timestamp};
use stateright::{Checker, Model, Property};

/// One step of time in milliseconds: a heartbeat interval. A lease lasts two.
const STEP: i64 = 1_000;
const LEASE: i64 = 2 * STEP;
const EPOCH: i64 = 1_800_000_000_000;

/// A member's process and what is under way between it and the coordinator.
#[derive(Clone, Debug)]
struct Side {
    consumer: Consumer,
    request: Option<HeartbeatRequest>,
    answer: Option<Box<HeartbeatResponse>>,
}

#[derive(Clone, Debug)]
struct State {
    /// Steps of time since the beginning.
    steps: i64,
    fields: RawFields,
    /// Every former state of the record, oldest first.
    past: Vec<RawFields>,
    sides: Vec<Side>,
    /// The stamp of the coordinator's own last commit.
    own: Stamp,
    /// It expires nobody before.
    judges_from: i64,
    /// When Redis lost writes, and when the record first showed it.
    lost_at: Option<i64>,
    noticed_at: Option<i64>,
    /// Shard, side and step of each shard's last grant to each.
    grants: Vec<(u32, usize, i64)>,
    writes: u64,
    violation: Option<String>,
}

impl State {
    /// Two states are the same if they look the same.
    fn text(&self) -> String {
        format!("{self:?}")
    }
}

impl Hash for State {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.text().hash(state);
    }
}

impl PartialEq for State {
    fn eq(&self, other: &Self) -> bool {
        self.text() == other.text()
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Step {
    /// The request of a member is decided on and recorded.
    Decide(usize),
    /// The answer reaches its member.
    Receive(usize),
    /// A drain ends.
    Drained(usize, u32),
    /// Redis falls back by so many writes.
    RollBack(usize),
    /// Time goes on; what was not delivered is late.
    Pass,
}

struct World {
    settings: Settings,
    key: GroupKey,
    steps: i64,
    may_roll_back: bool,
}

impl World {
    fn new(steps: i64, may_roll_back: bool) -> Self {
        let settings = Settings {
            heartbeat_interval_ms: STEP.unsigned_abs(),
            member_lease_ttl_ms: LEASE.unsigned_abs(),
            // Longer than any schedule here: nobody is fenced for slowness.
            rebalance_timeout_ms: 2 * LEASE.unsigned_abs(),
            stale_member_retention_ms: 20 * LEASE.unsigned_abs(),
            ..Settings::default()
        };
        World { settings, key: GroupKey::new("orders", "billing").expect("names"), steps, may_roll_back }
    }

    fn group(&self, state: &State) -> Group {
        load(&self.key, &state.fields, &self.settings).expect("what was written loads").group
    }

    fn store(&self, state: &mut State, write: &rsc_core::Write) {
        state.past.push(state.fields.clone());
        state.writes += 1;
        let mut set = |field: &str, value: String| {
            state.fields.insert(field.to_owned(), value.into_bytes());
        };
        if let WriteKind::Structural { aggregate, revision } = &write.kind {
            set("aggregate", aggregate.clone());
            set("revision", revision.to_string());
        }
        set("updatedAt", write.updated_at.to_string());
        set("writeId", format!("w{}", state.writes));
        for (id, live) in &write.live {
            set(&format!("live:{id}"), live.clone());
        }
        let live = state
            .fields
            .get("liveRevision")
            .map_or(0, |text| String::from_utf8_lossy(text).parse::<u64>().expect("a number"));
        state.fields.insert("liveRevision".to_owned(), (live + 1).to_string().into_bytes());
        for id in &write.removed_live {
            state.fields.remove(&format!("live:{id}"));
        }
        state.own = rsc_core::record::stamp(&state.fields).expect("a stamp");
    }

    /// One turn of the coordinator.
    fn turn(&self, state: &mut State, command: Command, side: Option<usize>) {
        let now = Timestamp::from_millis(EPOCH + state.steps * STEP);
        let loaded = load(&self.key, &state.fields, &self.settings).expect("what was written loads");
        let mut commands = vec![command];
        if !is_successor(&loaded.stamp, &state.own) {
            state.judges_from = state.steps + LEASE / STEP;
            commands.insert(0, Command::LostWrites { observed_metadata_version: 0 });
        }
        let context = Context {
            now,
            settings: self.settings.clone(),
            may_expire: state.steps >= state.judges_from,
            may_grant: true,
            may_hand_out: true,
            metadata_token: format!("t{}", state.writes),
            routing_ttl_age_ms: 0,
        };
        let before = loaded.group.clone();
        let decision = decide(loaded.group, &loaded.stray_live, &commands, &context);
        let mut wrong = decision.group.validate();
        wrong.extend(validate_transition(&before, &decision.group, now));
        if let Some(first) = wrong.first() {
            state.violation.get_or_insert(first.to_string());
        }
        if let Some(write) = &decision.write {
            self.store(state, write);
        }
        if decision.counts.corrections_begun > 0 {
            state.noticed_at = state.noticed_at.or(Some(state.steps));
        }
        self.note_grants(state, &before, &decision.group);
        if let (Some(side), Some(Reply::Heartbeat(response))) = (side, decision.replies.last()) {
            state.sides[side].answer = Some(response.clone());
        }
    }

    fn note_grants(&self, state: &mut State, before: &Group, after: &Group) {
        for (side, id) in ["a", "b"].iter().enumerate() {
            let Some(member) = after.members.get(*id) else { continue };
            for (shard, grant) in &member.granted {
                let former = before.members.get(*id).and_then(|former| former.granted.get(shard));
                if former.is_none_or(|former| former.metadata_version != grant.metadata_version) {
                    state.grants.retain(|(known, of, _)| (*known, *of) != (*shard, side));
                    state.grants.push((*shard, side, state.steps));
                }
            }
        }
    }

    fn carry_out(state: &mut State, side: usize, event: Event) {
        let now = Duration::from_millis((state.steps * STEP).unsigned_abs());
        for wish in state.sides[side].consumer.handle(now, event) {
            if let Wish::Send(request) = wish {
                state.sides[side].request = Some(*request);
                // The answer to an older request would be dropped.
                state.sides[side].answer = None;
            }
        }
    }

    /// No shard is read or drained by both, but by a grant between the loss and its first sign, for one lease.
    fn one_reader(&self, state: &State) -> Option<String> {
        let now = Duration::from_millis((state.steps * STEP).unsigned_abs());
        let touches = |side: &Side| -> Vec<u32> {
            let shards = side.consumer.shards().filter(|(_, work)| *work != Work::Drained);
            if side.consumer.may_read(now) { shards.map(|(shard, _)| shard).collect() } else { Vec::new() }
        };
        let (one, other) = (touches(&state.sides[0]), touches(&state.sides[1]));
        let shard = one.iter().find(|shard| other.contains(shard))?;
        let unaware = |at: i64| {
            state.lost_at.is_some_and(|lost| {
                at >= lost
                    && state.noticed_at.is_none_or(|noticed| at <= noticed)
                    && state.steps < lost + LEASE / STEP
            })
        };
        let excused = state.grants.iter().any(|(granted, _, at)| granted == shard && unaware(*at));
        (!excused).then(|| format!("shard {shard} has two readers"))
    }
}

impl Model for World {
    type State = State;
    type Action = Step;

    /// `a` owns both shards and has been told to drain one of them: `b` has joined.
    fn init_states(&self) -> Vec<State> {
        let now = Timestamp::from_millis(EPOCH);
        let creation = lifecycle::create(&self.key, 2, now, "t", None, &self.settings);
        let side = |id: &str| {
            let identity = Identity {
                member_id: id.to_owned(),
                member_name: None,
                instance_id: format!("{id}-1"),
                first_sequence: 0,
            };
            let settings = ClientSettings {
                heartbeat_interval: Duration::from_millis(STEP.unsigned_abs()),
                request_timeout: Duration::from_millis(STEP.unsigned_abs()),
                retry_pause: Duration::from_millis(STEP.unsigned_abs()),
                assumed_lease: Duration::from_millis(LEASE.unsigned_abs()),
            };
            let capacity = CapacityReport { runtime_max_concurrency: 1, available_concurrency: 1 };
            Side { consumer: Consumer::new(identity, settings, capacity), request: None, answer: None }
        };
        let mut state = State {
            steps: 0,
            fields: RawFields::from([("layoutVersion".to_owned(), b"2".to_vec())]),
            past: Vec::new(),
            sides: vec![side("a"), side("b")],
            own: Stamp::default(),
            judges_from: 0,
            lost_at: None,
            noticed_at: None,
            grants: Vec::new(),
            writes: 0,
            violation: None,
        };
        self.store(&mut state, &creation.write);
        self.turn(&mut state, Command::Provisioned, None);
        for side in [0, 1] {
            Self::carry_out(&mut state, side, Event::Time);
            state = self.next_state(&state, Step::Decide(side)).expect("a join");
            if side == 0 {
                state = self.next_state(&state, Step::Receive(side)).expect("its answer");
            }
        }
        state.past.clear();
        vec![state]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Step>) {
        if state.violation.is_some() {
            return;
        }
        for (index, side) in state.sides.iter().enumerate() {
            if side.request.is_some() {
                actions.push(Step::Decide(index));
            }
            if side.answer.is_some() {
                actions.push(Step::Receive(index));
            }
            for (shard, work) in side.consumer.shards() {
                if matches!(work, Work::Draining { .. }) {
                    actions.push(Step::Drained(index, shard));
                }
            }
        }
        if self.may_roll_back && state.lost_at.is_none() {
            actions.extend((1..=state.past.len().min(3)).map(Step::RollBack));
        }
        if state.steps < self.steps {
            actions.push(Step::Pass);
        }
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        match step {
            Step::Decide(side) => {
                let request = state.sides[side].request.take()?;
                let command = Command::Heartbeat {
                    path_member_id: request.member_id.clone(),
                    request: Box::new(request),
                };
                self.turn(&mut state, command, Some(side));
            }
            Step::Receive(side) => {
                let answer = state.sides[side].answer.take()?;
                Self::carry_out(&mut state, side, Event::Answer(answer));
            }
            Step::Drained(side, shard) => {
                Self::carry_out(&mut state, side, Event::Drain { shard, in_flight: 0 });
            }
            Step::RollBack(writes) => {
                let keep = state.past.len().checked_sub(writes)?;
                state.fields = state.past.drain(keep..).next()?;
                state.lost_at = Some(state.steps);
            }
            Step::Pass => {
                state.steps += 1;
                for side in 0..state.sides.len() {
                    Self::carry_out(&mut state, side, Event::Time);
                }
            }
        }
        if state.violation.is_none() {
            state.violation = self.one_reader(&state);
        }
        // The past beyond what a rollback reaches does not tell states apart; after the loss none does.
        let reach = if state.lost_at.is_some() { 0 } else { 3 };
        let beyond = state.past.len().saturating_sub(reach);
        state.past.drain(..beyond);
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("every invariant holds", |_: &World, state: &State| state.violation.is_none()),
            Property::sometimes("the hand-over comes to its end", |world: &World, state: &State| {
                let group = world.group(state);
                let readers: usize = state.sides.iter().map(|side| side.consumer.shards().count()).sum();
                readers == 2
                    && group.members.len() == 2
                    && group.members.values().all(|member| member.current.len() == 1)
            }),
        ]
    }
}

fn explore(world: World) -> usize {
    let checker = world.checker().threads(2).spawn_bfs().join();
    checker.assert_properties();
    checker.unique_state_count()
}

#[test]
fn a_hand_over_without_loss() {
    let states = explore(World::new(3, false));
    println!("{states} states");
    assert!(states > 100);
}

#[test]
fn a_hand_over_with_one_rollback_at_any_moment() {
    let states = explore(World::new(2, true));
    println!("{states} states");
    assert!(states > 100);
}

#[test]
fn the_model_bites() {
    use rsc_core::fault::{Fault, plant};
    // One thread: faults are planted per thread.
    let found = |fault: Fault, steps: i64| {
        plant(Some(fault));
        let world = World::new(steps, false);
        let mut frontier = std::collections::VecDeque::from(world.init_states());
        let mut seen = std::collections::HashSet::new();
        let found = loop {
            let Some(state) = frontier.pop_front() else { break false };
            if state.violation.is_some() {
                break true;
            }
            let mut actions = Vec::new();
            world.actions(&state, &mut actions);
            let next = actions.into_iter().filter_map(|action| world.next_state(&state, action));
            frontier.extend(next.filter(|state| seen.insert(state.text())));
        };
        plant(None);
        found
    };
    for fault in [Fault::GrantIgnoresGranted, Fault::DrainingCountsAsReleased] {
        assert!(found(fault, 3), "{fault:?}");
    }
}
