//! Random choices that can be made again.

/// The seed of a test's random choices: `TEST_SEED`, or a new one. A failing test shows it. Timing is the machine's,
/// so that the same seed makes the same choices and not the same run.
pub(crate) fn seed() -> u64 {
    let given = std::env::var("TEST_SEED").ok();
    let seed = given.map_or_else(rand::random, |text| text.parse().unwrap());
    eprintln!("random choices of this run: TEST_SEED={seed}");
    seed
}
