//! Black-box tests of `rsc dev`: what a person sees, and what is left behind when it ends.
#![expect(clippy::unwrap_used, clippy::panic, reason = "the helpers of a test fail like the test")]

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use support::wait_until_blocking;
use tempfile::TempDir;

/// Long enough for anything that happens, on a slow machine that runs other tests beside this one.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running `rsc dev`, killed when it is dropped.
struct Demo {
    child: Child,
    /// For its temporary files: killed, it cannot remove them itself.
    _directory: TempDir,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Demo {
    fn start(arguments: &[&str], path: Option<&str>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_rsc"));
        command.args(["dev", "--listen", "127.0.0.1:0"]).args(arguments).env("TMPDIR", directory.path());
        if let Some(path) = path {
            command.env("PATH", path);
        }
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (say, lines) = channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                if say.send(line).is_err() {
                    break;
                }
            }
        });
        Demo { child, _directory: directory, lines, seen: Vec::new() }
    }

    /// Reads on until a line contains `text`; returns that line.
    fn until(&mut self, text: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(line) = self.lines.recv_timeout(left) else {
                panic!("{text:?} does not show in:\n{}", self.seen.join("\n"));
            };
            self.seen.push(line.clone());
            if line.contains(text) {
                return line;
            }
        }
    }

    /// Reads to the end; returns everything.
    fn finish(&mut self) -> (ExitStatus, String) {
        self.seen.extend(self.lines.iter());
        (self.child.wait().unwrap(), self.seen.join("\n"))
    }

    /// The port of the private redis-server, as the demo says.
    fn redis_port(&mut self) -> u16 {
        let line = self.until("store ");
        line.rsplit(' ').next().unwrap().parse().unwrap_or_else(|_| panic!("no port in {line:?}"))
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

fn wait_until_closed(port: u16) {
    wait_until_blocking("the private redis-server is gone", || {
        TcpStream::connect(("127.0.0.1", port)).is_err().then_some(())
    });
}

fn assert_shows_a_hand_over(output: &str) {
    for name in ["consumer-a", "consumer-b", "consumer-c"] {
        assert!(output.contains(&format!("{name} joined with epoch")), "{name} in:\n{output}");
        assert!(output.contains(&format!("{name} left, with everything given back")), "{name} in:\n{output}");
    }
    for step in
        ["consumer-a is asked to drain", "consumer-a has drained", "moved from consumer-a to consumer-b"]
    {
        assert!(output.contains(step), "{step:?} in:\n{output}");
    }
    assert!(output.contains("STABLE"), "{output}");
    assert!(!output.contains('\u{1b}'), "colour although this is no terminal:\n{output}");
    let (_, table) = output.split_once(" time group").unwrap();
    for line in table.lines() {
        assert!(!line.contains("TWO") && !line.contains('#'), "{line:?}");
        assert!(line.chars().count() <= 80, "wider than 80 columns: {line:?}");
    }
}

#[test]
fn with_a_redis_server_on_the_path_it_uses_a_private_one_and_leaves_nothing_behind() {
    let mut demo = Demo::start(&["--seconds", "12"], None);
    let port = demo.redis_port();
    assert!(TcpStream::connect(("127.0.0.1", port)).is_ok());
    let (status, output) = demo.finish();
    assert!(output.contains("store        redis, a private server"), "{output}");
    assert_shows_a_hand_over(&output);
    let counts =
        output.lines().filter_map(|line| line.rsplit(' ').next()?.split_once('/')).next_back().unwrap();
    let (read, sent): (u64, u64) = (counts.0.parse().unwrap(), counts.1.parse().unwrap());
    assert!(0 < read && read <= sent, "{read} of {sent} records were read:\n{output}");
    assert_eq!(status.code(), Some(0));
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "the redis-server was left behind");
}

#[test]
fn without_a_redis_server_it_uses_the_memory_store_and_says_so() {
    let mut demo = Demo::start(&["--seconds", "12"], Some(""));
    let (status, output) = demo.finish();
    assert!(output.contains("store        memory, because there is no redis-server on the PATH"), "{output}");
    assert_shows_a_hand_over(&output);
    assert_eq!(status.code(), Some(0));
}

#[test]
fn a_crash_is_announced_and_its_shards_move_only_after_the_lease() {
    let mut demo = Demo::start(&[], Some(""));
    demo.until("consumer-c crashed without a word: its lease must run out first");
    let moved = demo.until("moved from consumer-c to");
    let output = demo.seen.join("\n");
    assert!(output.lines().any(|line| line.contains("  x")), "no row shows the waiting shards:\n{output}");
    assert!(!output.contains("TWO"), "{output}\n{moved}");
}

#[test]
fn a_signal_ends_it_in_good_order() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let mut demo = Demo::start(&[], None);
        let port = demo.redis_port();
        demo.until("consumer-a joined");
        demo.signal(signal);
        let (status, output) = demo.finish();
        assert_eq!(status.code(), Some(0), "{signal:?}:\n{output}");
        assert!(output.contains("consumer-a left"), "{signal:?}:\n{output}");
        wait_until_closed(port);
    }
}

#[test]
fn even_killed_it_leaves_no_redis_server_behind() {
    let mut demo = Demo::start(&[], None);
    let port = demo.redis_port();
    demo.until("time group");
    demo.signal(Signal::KILL);
    demo.finish();
    wait_until_closed(port);
}

#[test]
fn the_death_of_its_redis_server_is_announced_and_everybody_stops_by_the_lease() {
    let mut demo = Demo::start(&["--log-filter", "off"], None);
    let port = demo.redis_port();
    demo.until("consumer-a starts to read");
    let mut redis = TcpStream::connect(("127.0.0.1", port)).unwrap();
    redis.write_all(b"SHUTDOWN NOSAVE\r\n").unwrap();
    demo.until("redis-server has died");
    demo.until("consumer-a heard nothing for a lease: it stops reading");
}

#[test]
fn a_taken_port_is_one_clear_sentence() {
    let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let mut child = Command::new(env!("CARGO_BIN_EXE_rsc"))
        .args(["dev", "--listen", &address])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut out, mut complaint) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut complaint).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    assert_eq!((out.as_str(), complaint.lines().count()), ("", 1), "{complaint}");
    assert!(complaint.contains(&format!("{address} is taken by another process")), "{complaint}");
    assert!(complaint.contains("--listen"), "{complaint}");
}

#[test]
fn a_redis_server_that_does_not_run_is_no_obstacle() {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("redis-server");
    std::fs::write(&program, "#!/bin/sh\nexit 3\n").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut demo = Demo::start(&["--seconds", "0"], directory.path().to_str());
    let line = demo.until("store ");
    assert!(line.contains("memory, because") && line.contains("does not run"), "{line}");
    assert_eq!(demo.finish().0.code(), Some(0));
}

#[test]
fn bad_arguments_are_refused_with_2() {
    let bad: [&[&str]; 4] = [
        &["--listen", "0.0.0.0:0"],
        &["--listen", "localhost:0"],
        &["--seconds", "-1"],
        &["--listen", "127.0.0.1:0", "--log-filter", "x=y=z"],
    ];
    for arguments in bad {
        let output = Command::new(env!("CARGO_BIN_EXE_rsc")).arg("dev").args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(!output.stderr.is_empty(), "{arguments:?}");
    }
}
