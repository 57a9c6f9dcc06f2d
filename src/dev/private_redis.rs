//! A `redis-server` of the demo's own: on a loopback port of its own, in a directory of its own, keeping
//! nothing, gone with this process.

use std::ffi::OsStr;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::{Instant, sleep, timeout};

/// How long a server may take until it answers.
const START: Duration = Duration::from_secs(10);
/// How long a server may take to end.
const STOP: Duration = Duration::from_secs(3);
/// A free port can be taken by somebody else before the server binds it.
const ATTEMPTS: usize = 3;

/// Runs the server given as `$0 $@` for as long as standard input is open. The pipe closes when this
/// process ends in whatever way, `kill -9` included, so that no server is ever left behind. The server is
/// not in the terminal's process group: a Ctrl-C must not end it before the coordinator has.
const WHILE_STDIN_IS_OPEN: &str = r#"
exec 3<&0
"$0" "$@" 3<&- &
server=$!
(read -r _ <&3; kill "$server") 2>/dev/null &
exec 3<&-
wait "$server"
"#;

/// A running private server.
#[derive(Debug)]
pub(crate) struct PrivateRedis {
    guard: Child,
    /// Held open, and not by the guard itself: waiting for a child closes the pipe that it holds.
    pipe: Option<ChildStdin>,
    port: u16,
    directory: TempDir,
}

/// The `redis-server` that `PATH` leads to, if there is one.
pub(crate) fn find() -> Option<PathBuf> {
    find_in(std::env::var_os("PATH").as_deref())
}

fn find_in(path: Option<&OsStr>) -> Option<PathBuf> {
    std::env::split_paths(path?)
        .filter(|directory| directory.is_absolute())
        .map(|directory| directory.join("redis-server"))
        .find(|program| is_executable(program))
}

fn is_executable(program: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    program.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

impl PrivateRedis {
    /// Starts `program` and waits until it answers.
    ///
    /// # Errors
    /// When it cannot be started or does not answer in time; the sentence carries its last log lines.
    pub(crate) async fn start(program: &Path) -> anyhow::Result<Self> {
        let deadline = Instant::now() + START;
        let mut attempts = 1;
        loop {
            match Self::try_start(program, deadline).await {
                Err(_) if attempts < ATTEMPTS && Instant::now() < deadline => attempts += 1,
                result => return result,
            }
        }
    }

    async fn try_start(program: &Path, deadline: Instant) -> anyhow::Result<Self> {
        let directory = TempDir::with_prefix("rsc-dev-")?;
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        let mut guard = Command::new("/bin/sh")
            .args(["-c", WHILE_STDIN_IS_OPEN])
            .arg(program)
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no", "--daemonize", "no"])
            .args(["--logfile", "redis.log", "--dir"])
            .arg(directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context("a shell to run redis-server under")?;
        let pipe = guard.stdin.take();
        let mut server = PrivateRedis { guard, pipe, port, directory };
        if server.answers(deadline).await {
            return Ok(server);
        }
        let log = std::fs::read_to_string(server.directory.path().join("redis.log")).unwrap_or_default();
        let last = log.lines().last().unwrap_or("it logged nothing").to_owned();
        server.stop().await;
        bail!("{} does not run: {last}", program.display())
    }

    /// Waits until the server answers; `false` if it ends before, or takes too long.
    async fn answers(&mut self, deadline: Instant) -> bool {
        while Instant::now() < deadline {
            if self.guard.try_wait().ok().flatten().is_some() {
                return false;
            }
            if timeout(Duration::from_secs(1), ping(self.port)).await.is_ok_and(|pong| pong.is_ok()) {
                return true;
            }
            sleep(Duration::from_millis(20)).await;
        }
        false
    }

    /// Its port on 127.0.0.1.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Resolves when the server ends by itself, or somebody ends it.
    pub(crate) async fn died(&mut self) -> String {
        match self.guard.wait().await {
            Ok(status) => describe(status),
            Err(error) => error.to_string(),
        }
    }

    /// Ends the server and removes its directory.
    pub(crate) async fn stop(mut self) {
        drop(self.pipe.take());
        // The guard waits for the server; what does not end in time ends when the guard's pipe is gone.
        let _ = timeout(STOP, self.guard.wait()).await;
    }
}

/// The shell reports a signal as 128 + its number.
fn describe(status: ExitStatus) -> String {
    match status.code() {
        Some(code) if code > 128 => format!("signal {}", code - 128),
        Some(code) => format!("exit code {code}"),
        None => status.to_string(),
    }
}

async fn ping(port: u16) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
    stream.write_all(b"PING\r\n").await?;
    let mut answer = [0; 7];
    stream.read_exact(&mut answer).await?;
    if &answer == b"+PONG\r\n" { Ok(()) } else { Err(std::io::ErrorKind::InvalidData.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_executable_file_in_an_absolute_directory_of_the_path_is_found() {
        use std::os::unix::fs::PermissionsExt;
        let (empty, full) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let program = full.path().join("redis-server");
        std::fs::write(&program, "").unwrap();
        let path = std::env::join_paths([Path::new(""), empty.path(), full.path()]).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(find_in(Some(&path)), None);
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(find_in(Some(&path)), Some(program));
        assert_eq!(find_in(None), None);
        assert_eq!(find_in(Some(OsStr::new(""))), None);
    }
}
