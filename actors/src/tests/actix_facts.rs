//! What this crate builds on in actix 0.13: if one of these changes, the design has to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use actix::{
    Actor, ActorContext, ActorFutureExt, Arbiter, AsyncContext, Context, Handler, Message, WrapFuture,
};
use tokio::sync::{mpsc, oneshot};

use super::{eventually, in_system};

#[derive(Message)]
#[rtype(result = "()")]
struct Note(u32);

#[derive(Message)]
#[rtype(result = "()")]
struct Panic;

#[derive(Message)]
#[rtype(result = "()")]
struct StartWork(oneshot::Receiver<()>);

/// Records in which order things reach it.
struct Recorder {
    seen: mpsc::UnboundedSender<String>,
    ended: Arc<AtomicUsize>,
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.ended.fetch_add(1, Ordering::SeqCst);
    }
}

impl Actor for Recorder {
    type Context = Context<Self>;

    fn stopped(&mut self, _: &mut Self::Context) {
        let _gone = self.seen.send("stopped".to_owned());
    }
}

impl Handler<Note> for Recorder {
    type Result = ();
    fn handle(&mut self, Note(number): Note, _: &mut Self::Context) {
        let _gone = self.seen.send(format!("note {number}"));
    }
}

impl Handler<Panic> for Recorder {
    type Result = ();
    fn handle(&mut self, _: Panic, _: &mut Self::Context) {
        panic!("on purpose");
    }
}

impl Handler<StartWork> for Recorder {
    type Result = ();
    fn handle(&mut self, StartWork(work): StartWork, ctx: &mut Self::Context) {
        ctx.spawn(work.into_actor(self).map(|_, actor, ctx| {
            let _gone = actor.seen.send("work done".to_owned());
            ctx.stop();
        }));
    }
}

fn recorder(arbiter: &Arbiter) -> (actix::Addr<Recorder>, mpsc::UnboundedReceiver<String>, Arc<AtomicUsize>) {
    let (seen, sees) = mpsc::unbounded_channel();
    let ended = Arc::new(AtomicUsize::new(0));
    let mine = ended.clone();
    let actor = Recorder::start_in_arbiter(&arbiter.handle(), move |_| Recorder { seen, ended: mine });
    (actor, sees, ended)
}

#[test]
fn a_spawned_future_leaves_the_actor_free_and_ends_in_the_actor() {
    in_system(async {
        let (actor, mut sees, _) = recorder(&Arbiter::new());
        let (done, work) = oneshot::channel();
        actor.do_send(StartWork(work));
        actor.do_send(Note(1));
        assert_eq!(sees.recv().await.unwrap(), "note 1", "while the work is under way");
        done.send(()).unwrap();
        assert_eq!(sees.recv().await.unwrap(), "work done");
        assert_eq!(sees.recv().await.unwrap(), "stopped");
    });
}

#[test]
fn a_flooded_mailbox_goes_ahead_of_completions() {
    in_system(async {
        let arbiter = Arbiter::new();
        let (actor, mut sees, _) = recorder(&arbiter);
        let (done, work) = oneshot::channel();
        actor.do_send(StartWork(work));
        actor.do_send(Note(0));
        assert_eq!(sees.recv().await.unwrap(), "note 0");
        // The arbiter is kept busy while the completion becomes ready first and the notes come after it.
        let (release, held) = std::sync::mpsc::channel::<()>();
        let (blocked, is_blocked) = oneshot::channel();
        arbiter.spawn_fn(move || {
            let _told = blocked.send(());
            let _released = held.recv();
        });
        is_blocked.await.unwrap();
        done.send(()).unwrap();
        for number in 1..=100 {
            actor.do_send(Note(number));
        }
        release.send(()).unwrap();
        for number in 1..=100 {
            assert_eq!(sees.recv().await.unwrap(), format!("note {number}"));
        }
        assert_eq!(sees.recv().await.unwrap(), "work done", "this is why commands are kept outside");
    });
}

#[test]
fn do_send_ignores_the_capacity_that_try_send_respects() {
    in_system(async {
        let arbiter = Arbiter::new();
        let (actor, mut sees, _) = recorder(&arbiter);
        let (release, held) = std::sync::mpsc::channel::<()>();
        let (blocked, is_blocked) = oneshot::channel();
        arbiter.spawn_fn(move || {
            let _sent = blocked.send(());
            let _released = held.recv();
        });
        is_blocked.await.unwrap();
        let mut taken = 0;
        while actor.try_send(Note(taken)).is_ok() {
            taken += 1;
            assert!(taken < 100, "the default capacity is small");
        }
        actor.do_send(Note(taken));
        release.send(()).unwrap();
        for number in 0..=taken {
            assert_eq!(sees.recv().await.unwrap(), format!("note {number}"));
        }
    });
}

#[test]
fn a_panic_ends_the_actor_silently_drops_it_and_leaves_the_arbiter_alive() {
    in_system(async {
        let arbiter = Arbiter::new();
        let (actor, mut sees, ended) = recorder(&arbiter);
        actor.do_send(Note(1));
        assert_eq!(sees.recv().await.unwrap(), "note 1");
        actor.do_send(Panic);
        eventually("the actor is dropped", || async { ended.load(Ordering::SeqCst) == 1 }).await;
        assert!(!actor.connected());
        actor.do_send(Note(2));
        let (other, mut other_sees, _) = recorder(&arbiter);
        other.do_send(Note(3));
        assert_eq!(other_sees.recv().await.unwrap(), "note 3");
    });
}

#[test]
fn a_system_that_stops_does_not_wait_for_arbiters() {
    let finished = Arc::new(AtomicBool::new(false));
    let seen = finished.clone();
    in_system(async move {
        let arbiter = Arbiter::new();
        let (started, is_started) = oneshot::channel();
        arbiter.spawn(async move {
            let _sent = started.send(());
            tokio::time::sleep(Duration::from_secs(3_600)).await;
            seen.store(true, Ordering::SeqCst);
        });
        is_started.await.unwrap();
    });
    assert!(!finished.load(Ordering::SeqCst), "this is why every actor is counted at the gate");
}
