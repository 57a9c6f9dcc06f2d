//! A proxy between a daemon and its Redis that knows the commits of migration steps when they come by, and kills the
//! daemon there: right before the commit reaches Redis, or right after, its answer swallowed.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rsc_protocol::GroupKey;
use rsc_protocol::keys::Keys;
use rustix::process::{Pid, Signal, kill_process};

/// How long a commit that was passed on may take.
const COMMIT_TAKES: Duration = Duration::from_secs(5);

/// Which side of a commit a daemon died on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Moment {
    /// Redis has not seen it.
    Before,
    /// It stands, and nobody was told.
    After,
}

/// Group, step and moment of a kill.
pub(crate) type Kill = (String, String, Moment);

/// The kills of one test: for each group and each of some steps one before and one after. Clones are the same.
#[derive(Clone)]
pub(crate) struct Ambush {
    groups: Arc<Vec<GroupKey>>,
    steps: Arc<Mutex<Vec<String>>>,
    kills: Arc<Mutex<Vec<Kill>>>,
}

impl Ambush {
    /// Nobody is killed before [`Ambush::lay`].
    pub(crate) fn on(groups: &[GroupKey]) -> Self {
        Ambush { groups: Arc::new(groups.to_vec()), steps: Arc::default(), kills: Arc::default() }
    }

    /// From now on whoever records one of these steps is killed, twice for each group.
    pub(crate) fn lay(&self, steps: &[&str]) {
        self.kills.lock().unwrap().clear();
        *self.steps.lock().unwrap() = steps.iter().map(|&step| step.to_owned()).collect();
    }

    /// Every kill so far.
    pub(crate) fn kills(&self) -> BTreeSet<Kill> {
        self.kills.lock().unwrap().iter().cloned().collect()
    }

    /// Every kill there is to be.
    pub(crate) fn planned(&self) -> BTreeSet<Kill> {
        let steps = self.steps.lock().unwrap().clone();
        let kills = |group: &GroupKey, step: &String| {
            [Moment::Before, Moment::After].map(|at| (group.consumer_group().to_owned(), step.clone(), at))
        };
        self.groups.iter().flat_map(|group| steps.iter().flat_map(move |step| kills(group, step))).collect()
    }

    fn next(&self, group: &str, step: &str) -> Option<Moment> {
        if !self.steps.lock().unwrap().iter().any(|wanted| wanted == step) {
            return None;
        }
        let kills = self.kills.lock().unwrap();
        match kills.iter().filter(|(of, at, _)| of == group && at == step).count() {
            0 => Some(Moment::Before),
            1 => Some(Moment::After),
            _ => None,
        }
    }

    fn note(&self, group: &str, step: &str, moment: Moment) {
        self.kills.lock().unwrap().push((group.to_owned(), step.to_owned(), moment));
    }
}

/// A listening proxy of one daemon.
#[derive(Clone)]
pub(crate) struct AmbushProxy {
    port: u16,
    post: Arc<Post>,
}

struct Post {
    redis: u16,
    ambush: Ambush,
    /// The daemon's process; 0 while there is none to kill.
    victim: AtomicU32,
}

impl AmbushProxy {
    /// Listens for a daemon; `redis`: the server's port.
    pub(crate) fn start(redis: u16, ambush: &Ambush) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let post = Arc::new(Post { redis, ambush: ambush.clone(), victim: AtomicU32::new(0) });
        let shared = post.clone();
        thread::spawn(move || {
            for daemon in listener.incoming().map_while(Result::ok) {
                let post = shared.clone();
                thread::spawn(move || pass_on(&post, daemon));
            }
        });
        AmbushProxy { port, post }
    }

    /// What follows `--redis-url`.
    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The daemon to kill from now on; 0: none.
    pub(crate) fn aim_at(&self, process: u32) {
        self.post.victim.store(process, Ordering::SeqCst);
    }
}

impl Post {
    /// Whose step it is, which step, and the history entry, if this command is the commit of one.
    fn step_of<'c>(&self, command: &'c [Vec<u8>]) -> Option<(&GroupKey, &'c str, &'c [u8])> {
        const MARK: &str = "\"step\":\"";
        let entry =
            command.iter().find(|argument| argument.starts_with(b"{\"") && contains(argument, MARK))?;
        let text = std::str::from_utf8(entry).ok()?;
        let step = text.split_once(MARK)?.1.split('"').next()?;
        let group = self.ambush.groups.iter().find(|group| {
            let key = Keys::default().metadata(group);
            command.iter().any(|argument| argument == key.as_bytes())
        })?;
        Some((group, step, entry))
    }

    fn kill(&self) {
        let victim = self.victim.swap(0, Ordering::SeqCst);
        if let Some(pid) = i32::try_from(victim).ok().and_then(Pid::from_raw) {
            // It may be gone already.
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    /// Waits until this entry stands in the group's history; `false` if it does not come.
    fn has_committed(&self, group: &GroupKey, entry: &[u8]) -> bool {
        let client = redis::Client::open(format!("redis://127.0.0.1:{}", self.redis)).unwrap();
        let mut connection = client.get_connection().unwrap();
        let (key, asked) = (Keys::default().history(group), Instant::now());
        let entry = redis::Value::BulkString(entry.to_vec());
        while asked.elapsed() < COMMIT_TAKES {
            let mut newest = redis::cmd("XREVRANGE");
            newest.arg(&key).arg("+").arg("-").arg("COUNT").arg(5);
            let found: Vec<(String, Vec<redis::Value>)> = newest.query(&mut connection).unwrap();
            if found.iter().any(|(_, fields)| fields.contains(&entry)) {
                return true;
            }
            thread::sleep(Duration::from_millis(1));
        }
        false
    }
}

fn contains(text: &[u8], wanted: &str) -> bool {
    text.windows(wanted.len()).any(|window| window == wanted.as_bytes())
}

fn pass_on(post: &Post, mut daemon: TcpStream) {
    let Ok(mut redis) = TcpStream::connect(("127.0.0.1", post.redis)) else { return };
    let muted = Arc::new(AtomicBool::new(false));
    let (mut answers, mut to_daemon) = (redis.try_clone().unwrap(), daemon.try_clone().unwrap());
    let is_muted = muted.clone();
    thread::spawn(move || {
        let mut bytes = [0; 65_536];
        while let Ok(count) = answers.read(&mut bytes) {
            if count == 0
                || (!is_muted.load(Ordering::SeqCst) && to_daemon.write_all(&bytes[..count]).is_err())
            {
                break;
            }
        }
        let _ = to_daemon.shutdown(Shutdown::Both);
    });
    let (mut unread, mut bytes) = (Vec::new(), [0; 65_536]);
    'open: while let Ok(count) = daemon.read(&mut bytes) {
        if count == 0 {
            break;
        }
        unread.extend_from_slice(&bytes[..count]);
        while let Some((command, length)) = parse(&unread) {
            let is_deadly = post.step_of(&command).and_then(|(group, step, entry)| {
                if post.victim.load(Ordering::SeqCst) == 0 {
                    return None;
                }
                Some((group, step, entry, post.ambush.next(group.consumer_group(), step)?))
            });
            if let Some((group, step, _, Moment::Before)) = is_deadly {
                post.ambush.note(group.consumer_group(), step, Moment::Before);
                post.kill();
                break 'open;
            }
            muted.store(is_deadly.is_some(), Ordering::SeqCst);
            if redis.write_all(&unread[..length]).is_err() {
                break 'open;
            }
            if let Some((group, step, entry, Moment::After)) = is_deadly {
                if post.has_committed(group, entry) {
                    post.ambush.note(group.consumer_group(), step, Moment::After);
                    post.kill();
                }
                break 'open;
            }
            unread.drain(..length);
        }
    }
    let _ = redis.shutdown(Shutdown::Both);
    let _ = daemon.shutdown(Shutdown::Both);
}

/// The first whole command of the bytes, and its length.
fn parse(bytes: &[u8]) -> Option<(Vec<Vec<u8>>, usize)> {
    let mut at = 0;
    let count = number(bytes, &mut at, b'*')?;
    let mut arguments = Vec::with_capacity(count);
    for _ in 0..count {
        let length = number(bytes, &mut at, b'$')?;
        arguments.push(bytes.get(at..at + length)?.to_vec());
        at += length + 2;
    }
    (at <= bytes.len()).then_some((arguments, at))
}

fn number(bytes: &[u8], at: &mut usize, kind: u8) -> Option<usize> {
    let line = bytes.get(*at..)?;
    let end = line.windows(2).position(|window| window == b"\r\n")?;
    assert_eq!(line.first(), Some(&kind), "{}", String::from_utf8_lossy(&line[..end]));
    *at += end + 2;
    std::str::from_utf8(&line[1..end]).unwrap().parse().ok()
}
