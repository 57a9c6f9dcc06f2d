//! Wall clocks that are off, and that jump while the process runs (Linux: `LD_PRELOAD` of `shifted_clock.c`).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

/// A wall clock that processes may be started with. It shows the machine's time until [`Clock::set`].
pub(crate) struct Clock {
    /// What `shifted_clock.c` reads: nanoseconds to be added.
    shift: File,
    directory: TempDir,
}

impl Clock {
    /// One that is off by so many seconds.
    pub(crate) fn off_by(seconds: i64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/shifted_clock.c");
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-O2", "-o"])
            .arg(directory.path().join("clock.so"))
            .arg(source)
            .status()
            .unwrap_or_else(|error| panic!("cc, which links every Rust program, cannot be started: {error}"));
        assert!(compiled.success(), "shifted_clock.c cannot be compiled: {compiled}");
        let shift = File::create(directory.path().join("shift")).unwrap();
        let clock = Clock { shift, directory };
        clock.set(seconds * 1_000);
        clock
    }

    /// It is off by so many milliseconds from now on.
    pub(crate) fn set(&self, ms: i64) {
        // In place: the processes have mapped the file.
        self.shift.write_all_at(&(ms * 1_000_000).to_ne_bytes(), 0).unwrap();
    }

    /// What a process needs in its environment.
    pub(crate) fn environment(&self) -> Vec<(String, String)> {
        let path = |name: &str| self.directory.path().join(name).to_str().unwrap().to_owned();
        vec![("LD_PRELOAD".to_owned(), path("clock.so")), ("SHIFTED_CLOCK_FILE".to_owned(), path("shift"))]
    }
}
