//! Who drives the migrations of a stream, todo by todo (protocol 6).

use std::collections::{BTreeMap, VecDeque};

use rsc_core::migration::stream::{Next, ShardFacts, Todo};

use super::streams::{Refused, Stream};

/// Drives todo by todo, at most `todos` of them, under traffic: whenever there is nothing to do now, everything is read
/// and time passes. `false`: it has settled before.
pub fn walk(stream: &mut Stream, driver: &mut Driver, todos: usize) -> bool {
    let mut done = 0;
    for _ in 0..1_000 {
        if done == todos {
            return true;
        }
        stream.traffic();
        match driver.one(stream).unwrap() {
            None => done += 1,
            Some(next) if next.has_settled() => return false,
            Some(_) => {
                stream.consume();
                stream.pass(7_000);
            }
        }
    }
    panic!("it never comes to a rest: {:#?}", stream.next(&BTreeMap::new()));
}

/// One instance at work on the stream: what it has looked up and is about to do is lost with it.
#[derive(Clone, Default)]
pub struct Driver {
    facts: BTreeMap<u32, ShardFacts>,
    queue: VecDeque<Todo>,
    /// Every step is done twice; the second time nothing moves.
    pub twice: bool,
    /// What it did last.
    pub did: Option<Todo>,
}

impl Driver {
    pub fn twice() -> Self {
        Driver { twice: true, ..Driver::default() }
    }

    /// The next single thing; `Some`: there is nothing to do now.
    pub fn one(&mut self, stream: &mut Stream) -> Result<Option<Next>, Refused> {
        if self.queue.is_empty() {
            let next = stream.next(&self.facts);
            if next.todo.is_empty() {
                self.facts.clear();
                return Ok(Some(next));
            }
            self.queue.extend(next.todo);
        }
        let todo = self.queue.pop_front().unwrap();
        let result = self.execute(stream, &todo);
        self.did = Some(todo);
        if result.is_err() {
            *self = Driver { twice: self.twice, ..Driver::default() };
        }
        result.map(|()| None)
    }

    /// What comes next as far as it knows.
    pub fn look(&self, stream: &Stream) -> Next {
        stream.next(&self.facts)
    }

    /// Whether it knows nothing and intends nothing.
    pub fn is_idle(&self) -> bool {
        self.facts.is_empty() && self.queue.is_empty()
    }

    /// What it is about to do, if it has asked already.
    pub fn intends(&self) -> Option<&Todo> {
        self.queue.front()
    }

    fn execute(&mut self, stream: &mut Stream, todo: &Todo) -> Result<(), Refused> {
        match todo {
            Todo::Prove(shards) => self.facts.extend(stream.prove(shards)),
            Todo::Delete(shards) => self.facts.extend(stream.delete(shards)),
            Todo::Provision { group, shards } => {
                self.facts.clear();
                stream.provision(group, shards)?;
            }
            Todo::Step { group, resharding_id, step } => {
                self.facts.clear();
                stream.step(group, resharding_id, step.clone())?;
                if self.twice {
                    let before = (stream.versions(), stream.loaded());
                    stream.step(group, resharding_id, step.clone())?;
                    assert_eq!((stream.versions(), stream.loaded()), before, "{} again", step.name());
                }
            }
        }
        Ok(())
    }

    /// Until there is nothing to do now.
    pub fn run(&mut self, stream: &mut Stream) -> Result<Next, Refused> {
        for _ in 0..1_000 {
            if let Some(next) = self.one(stream)? {
                return Ok(next);
            }
        }
        panic!("it never comes to a rest: {:#?}", stream.next(&self.facts));
    }
}
