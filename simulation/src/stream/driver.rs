//! The driver of the stream's migrations on one instance: take the stream's mutex, read all groups' records, ask
//! [`rsc_core::migration::stream::next`], do that in its order, ask again.

use std::collections::{BTreeMap, VecDeque};

use rsc_core::migration::stream::{self, Next, ShardFacts, StreamView, Todo};
use rsc_core::{Group, MigrationStep, Reply};
use rsc_protocol::Timestamp;

use super::coordinator::Job;
use super::operator::Request;
use super::plan::StreamFault;
use super::world::{Asker, Event, Op, Said, StreamWorld};

/// Something the driver does, one round trip or turn at a time.
#[derive(Debug)]
enum Piece {
    Ask(Op),
    Give { group: usize, job: Job },
}

/// Where the driver is.
#[derive(Debug, Default)]
pub(crate) enum Phase {
    #[default]
    Idle,
    Locking,
    /// Records are read, group by group.
    Reading,
    /// Between two todos.
    Renewing,
    /// Asked Redis, or an actor.
    Doing,
}

/// The driver.
#[derive(Debug, Default)]
pub(crate) struct Driver {
    pub(crate) phase: Phase,
    token: String,
    /// The round trip or the order that is waited for; 0 for none.
    waits_for: u64,
    /// Groups still to be read.
    unread: VecDeque<usize>,
    groups: Vec<Group>,
    now: i64,
    facts: BTreeMap<u32, ShardFacts>,
    todo: VecDeque<Todo>,
    pieces: VecDeque<Piece>,
    /// What an operator wants, until it is settled.
    pub(crate) requests: VecDeque<Request>,
    /// The todos prepare a change that an operator asked for: all groups, or none.
    prepares: bool,
    prepared_id: String,
    /// None of the todos was begun: what was read under the mutex must still be ours to act upon. Later on it is
    /// renewed and not asked for.
    is_first: bool,
    /// A change that could not be prepared is taken back: whoever refuses that is left to the next pass.
    takes_back: bool,
    pub(crate) timer: u64,
}

impl StreamWorld {
    fn driver(&mut self, index: usize) -> &mut Driver {
        &mut self.coordinators[index].driver
    }

    /// The driver looks again at that instant, or earlier if it is asked to.
    pub(crate) fn schedule_drive(&mut self, index: usize, after: i64) {
        let driver = self.driver(index);
        driver.timer += 1;
        let timer = driver.timer;
        let life = self.coordinators[index].life;
        self.schedule(self.at + after, Event::Drive { coordinator: index, life, timer });
    }

    /// A pass begins.
    pub(crate) fn drive(&mut self, index: usize, timer: u64) {
        let coordinator = &self.coordinators[index];
        let is_idle = matches!(coordinator.driver.phase, Phase::Idle);
        if coordinator.driver.timer != timer || !is_idle || !coordinator.alive {
            return;
        }
        if !self.boundary(index, "before a pass", 0.002) {
            return;
        }
        let token = format!("d{index}.{}", self.trips);
        self.driver(index).facts.clear();
        self.driver(index).token.clone_from(&token);
        self.driver_asks(index, Phase::Locking, Op::Lock { token });
    }

    fn driver_asks(&mut self, index: usize, phase: Phase, op: Op) {
        let trip = self.ask(index, Asker::Driver, op);
        let driver = self.driver(index);
        (driver.phase, driver.waits_for) = (phase, trip);
    }

    pub(crate) fn driver_hears_nothing(&mut self, index: usize, trip: u64) {
        if self.driver(index).waits_for == trip {
            // Whoever takes over waits until the mutex has ended.
            self.end_pass(index, self.shape.tick);
        }
    }

    /// The pass is over. A request that it was about has got an error, and is forgotten.
    fn end_pass(&mut self, index: usize, again_after: i64) {
        let driver = self.driver(index);
        (driver.phase, driver.waits_for) = (Phase::Idle, 0);
        driver.todo.clear();
        driver.pieces.clear();
        (driver.prepares, driver.takes_back) = (false, false);
        self.schedule_drive(index, again_after.max(1));
    }

    fn unlock(&mut self, index: usize) {
        let token = self.driver(index).token.clone();
        self.ask(index, Asker::Driver, Op::Unlock { token });
    }

    pub(crate) fn driver_hears(&mut self, index: usize, trip: u64, now: i64, said: Said) {
        let driver = self.driver(index);
        if driver.waits_for != trip {
            return;
        }
        driver.waits_for = 0;
        match (&driver.phase, said) {
            (Phase::Locking, Said::Locked(true)) => self.read_all(index),
            (Phase::Renewing, Said::Locked(holds)) if holds || !driver.is_first => self.go_on_driving(index),
            (Phase::Locking | Phase::Renewing, _) => {
                let pause = self.dice.between(1, self.shape.tick);
                self.end_pass(index, pause);
            }
            (Phase::Reading, Said::Read(found)) => {
                match found {
                    Some(snapshot) => {
                        driver.now = now;
                        driver.groups.push(snapshot.group.clone());
                    }
                    None if self.plan.lacks(StreamFault::MissingRecordLeftOut) => {}
                    None => {
                        // Nobody knows what its members read: nothing is decided without it.
                        self.unlock(index);
                        self.end_pass(index, self.shape.tick);
                        return;
                    }
                }
                self.read_next(index);
            }
            (Phase::Doing, Said::Locked(_)) => {
                self.tell(|_| format!("driver {index}: the deletion came too late"));
                self.end_pass(index, self.shape.tick);
            }
            (Phase::Doing, said) => {
                if let Said::Facts(shard, facts) = said {
                    driver.facts.insert(shard, facts);
                }
                self.next_piece(index);
            }
            _ => {}
        }
    }

    fn read_all(&mut self, index: usize) {
        let unread = (0..self.groups.len()).filter(|group| self.groups[*group].exists).collect();
        let driver = self.driver(index);
        driver.unread = unread;
        driver.groups.clear();
        self.read_next(index);
    }

    fn read_next(&mut self, index: usize) {
        match self.driver(index).unread.pop_front() {
            Some(group) => self.driver_asks(index, Phase::Reading, Op::Read { group }),
            None => self.consider(index),
        }
    }

    /// What the stream needs, by the records that were read.
    pub(crate) fn view_next(&self, groups: &[Group], now: i64, facts: &BTreeMap<u32, ShardFacts>) -> Next {
        stream::next(&StreamView {
            groups,
            now: Timestamp::from_millis(now),
            settings: &self.shape.timing.core,
            facts,
            fresh_id: &format!("repair-{}", self.trips),
        })
    }

    /// All records are read: what an operator asks for first, then what the stream needs.
    fn consider(&mut self, index: usize) {
        let driver = self.driver(index);
        let (groups, facts, now) =
            (std::mem::take(&mut driver.groups), std::mem::take(&mut driver.facts), driver.now);
        let request = driver.requests.pop_front();
        let next = self.view_next(&groups, now, &facts);
        let pending = groups.iter().find(|group| group.provisioning_pending).map(|group| {
            let shards = (0..group.shard_count).collect();
            Todo::Provision { group: group.key.clone(), shards }
        });
        let (mut todo, mut wake_at) = (VecDeque::from(next.todo.clone()), next.wake_at);
        if let Some(request) = request {
            match self.todos_of(&request, &groups, now, &next) {
                Ok(of_request) => {
                    todo = of_request.into();
                    if let Request::CreateGroup = request {
                        let (group, count) = (super::world::GROUPS.len() - 1, groups[0].shard_count);
                        let create = Piece::Ask(Op::Create { group, count });
                        self.driver(index).pieces.push_back(create);
                        self.next_piece(index);
                        return;
                    }
                    let is_new = matches!(
                        todo.front(),
                        Some(Todo::Step { step: MigrationStep::Prepare { compare: false, .. }, .. })
                    );
                    let id = super::operator::id_of(&todo);
                    let driver = self.driver(index);
                    (driver.prepares, driver.prepared_id) = (is_new, id);
                }
                Err(why) => {
                    self.counts.refused += 1;
                    self.tell(|_| format!("operator: {request:?} is refused: {why}"));
                }
            }
        }
        if let Some(provision) = pending {
            todo = VecDeque::from([provision]);
            wake_at = None;
        }
        if todo.is_empty() {
            self.tell(|_| {
                if next.waits_for.is_empty() {
                    String::new()
                } else {
                    format!("driver {index}: {}", next.waits_for)
                }
            });
            self.unlock(index);
            let due = wake_at.map_or(i64::MAX, |at| at.as_millis() - now);
            let tick = self.dice.between(self.shape.tick / 2, self.shape.tick * 2);
            self.end_pass(index, due.min(tick));
            return;
        }
        let driver = self.driver(index);
        (driver.groups, driver.facts, driver.todo) = (groups, facts, todo);
        driver.is_first = true;
        self.next_todo(index);
    }

    /// Before each todo the mutex is renewed.
    fn next_todo(&mut self, index: usize) {
        let token = self.driver(index).token.clone();
        self.driver_asks(index, Phase::Renewing, Op::Renew { token });
    }

    fn go_on_driving(&mut self, index: usize) {
        self.driver(index).is_first = false;
        let Some(todo) = self.driver(index).todo.pop_front() else {
            let driver = self.driver(index);
            driver.prepares = false;
            if std::mem::take(&mut driver.takes_back) {
                self.unlock(index);
                self.end_pass(index, self.shape.tick);
            } else {
                self.read_all(index);
            }
            return;
        };
        if !self.boundary(index, "before a todo of the driver", 0.02) {
            return;
        }
        self.tell(|_| format!("driver {index}: {}", brief(&todo)));
        let coordinated: Vec<(usize, String)> = self
            .driver(index)
            .groups
            .iter()
            .map(|group| (group_index(group), group.key.consumer_group().to_owned()))
            .collect();
        let keeps_facts = matches!(todo, Todo::Prove(_)) || self.plan.lacks(StreamFault::FactsOutliveSteps);
        let mutex = self.shape.timing.mutex;
        let is_creation = self.driver(index).groups.iter().any(|group| group.provisioning_pending);
        let driver = self.driver(index);
        if !keeps_facts {
            driver.facts.clear();
        }
        let order = |pieces: &VecDeque<Piece>| u64::try_from(pieces.len()).unwrap_or(0);
        match todo {
            Todo::Provision { group, shards } => {
                let Some(group) = index_of(group.consumer_group()) else { return };
                driver.pieces.extend(shards.iter().map(|shard| Piece::Ask(Op::Provision { group, shard })));
                if is_creation {
                    let order = order(&driver.pieces);
                    driver.pieces.push_back(Piece::Give { group, job: Job::Provisioned { order } });
                }
            }
            Todo::Step { group, resharding_id, step } => {
                let Some(group) = index_of(group.consumer_group()) else { return };
                let job = Job::Migrate { id: resharding_id, step: Box::new(step), order: 0 };
                driver.pieces.push_back(Piece::Give { group, job });
            }
            Todo::Prove(shards) => {
                let prove = |shard| Piece::Ask(Op::Prove { shard, coordinated: coordinated.clone() });
                driver.pieces.extend(shards.iter().map(prove));
            }
            Todo::Delete(shards) => {
                let before = driver.now + mutex;
                let delete =
                    |shard| Piece::Ask(Op::Delete { shard, coordinated: coordinated.clone(), before });
                driver.pieces.extend(shards.iter().map(delete));
            }
        }
        self.next_piece(index);
    }

    fn next_piece(&mut self, index: usize) {
        if !self.boundary(index, "between two messages of the driver", 0.01) {
            return;
        }
        match self.driver(index).pieces.pop_front() {
            None => self.next_todo(index),
            Some(Piece::Ask(op)) => self.driver_asks(index, Phase::Doing, op),
            Some(Piece::Give { group, mut job }) => {
                self.trips += 1;
                let number = self.trips;
                if let Job::Migrate { order, .. } | Job::Provisioned { order } = &mut job {
                    *order = number;
                }
                let driver = self.driver(index);
                (driver.phase, driver.waits_for) = (Phase::Doing, number);
                self.give(index, group, job);
            }
        }
    }

    /// An actor has taken a step, or could not.
    pub(crate) fn driver_told(&mut self, index: usize, order: u64, reply: Option<Reply>) {
        if self.driver(index).waits_for != order {
            return;
        }
        self.driver(index).waits_for = 0;
        match reply {
            Some(Reply::Done) => {
                if !self.boundary(index, "after a step of the driver", 0.02) {
                    return;
                }
                self.next_piece(index);
            }
            reply => self.step_failed(index, reply.as_ref()),
        }
    }

    /// A refusal ends the pass. A change that one group refused, or that it could not be asked for, is taken back from
    /// all of them: an answer may have been lost.
    fn step_failed(&mut self, index: usize, reply: Option<&Reply>) {
        self.tell(|_| format!("driver {index}: refused: {reply:?}"));
        let driver = self.driver(index);
        if driver.takes_back {
            self.next_piece(index);
            return;
        }
        if std::mem::take(&mut driver.prepares) {
            let (id, note) = (driver.prepared_id.clone(), super::operator::note(driver.now));
            let taken_back = |group: &Group| Todo::Step {
                group: group.key.clone(),
                resharding_id: id.clone(),
                step: MigrationStep::Rollback { note: Box::new(note.clone()), whole: false, compare: false },
            };
            driver.todo = driver.groups.iter().map(taken_back).collect();
            driver.takes_back = true;
            self.counts.refused += 1;
            self.next_todo(index);
            return;
        }
        self.unlock(index);
        self.end_pass(index, self.shape.tick);
    }
}

fn group_index(group: &Group) -> usize {
    index_of(group.key.consumer_group()).unwrap_or(0)
}

fn index_of(name: &str) -> Option<usize> {
    super::world::GROUPS.iter().position(|one| *one == name)
}

/// A todo for people.
fn brief(todo: &Todo) -> String {
    match todo {
        Todo::Provision { group, shards } => {
            format!("provision {} on {:?}", group.consumer_group(), shards.iter().collect::<Vec<_>>())
        }
        Todo::Step { group, resharding_id, step } => {
            format!("{} {resharding_id} {}", group.consumer_group(), step.name())
        }
        Todo::Prove(shards) => format!("prove {:?}", shards.iter().collect::<Vec<_>>()),
        Todo::Delete(shards) => format!("delete {:?}", shards.iter().collect::<Vec<_>>()),
    }
}
