//! What rounds cost: memory that they leave behind, which is none, and time.

use super::fixture::Host;
use super::tests::Bed;
use crate::policy::outcome::Outcome;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use std::alloc::System;
use std::fs;
use std::time::Duration;

/// Counts for all of the library's tests.
#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// What is allocated in this process and not freed: bytes, and pieces.
fn live() -> (usize, usize) {
    let stats = ALLOCATOR.stats();
    // What a piece grew or shrank by is counted as allocated or freed.
    (stats.bytes_allocated - stats.bytes_deallocated, stats.allocations - stats.deallocations)
}

/// The least that is live after any of some rounds: in the middle of one a lane may still put its answer away.
async fn least_live(bed: &mut Bed) -> (usize, usize) {
    let mut least = (usize::MAX, usize::MAX);
    for _ in 0..200 {
        assert_eq!(bed.outcome().await, Outcome::Success);
        let (bytes, pieces) = live();
        least = (least.0.min(bytes), least.1.min(pieces));
    }
    least
}

/// Set in the process that counts.
const ALONE: &str = "CSI_WARDEN_TEST_ALONE";

/// Counted in a process of its own, in which no other test allocates.
#[test]
fn rounds_over_eight_rails_leave_nothing_allocated() {
    if std::env::var_os(ALONE).is_none() {
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        let name =
            format!("{}::rounds_over_eight_rails_leave_nothing_allocated", module_path!().split_once("::").unwrap().1);
        let output = alone.args(["--exact", &name, "--nocapture"]).env(ALONE, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains("1 passed"), "ran nothing: {text}");
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut bed = Bed::all(Host::rails(8));
        for _ in 0..500 {
            assert_eq!(bed.outcome().await, Outcome::Success);
        }
        let before = least_live(&mut bed).await;
        for _ in 0..2_000 {
            assert_eq!(bed.outcome().await, Outcome::Success);
        }
        assert_eq!(least_live(&mut bed).await, before);
    });
}

/// `cargo test --release --lib rdma_round_cost -- --ignored --nocapture`
#[test]
#[ignore = "prints a figure"]
#[expect(clippy::print_stdout, reason = "a figure for people")]
fn rdma_round_cost() {
    let rounds: u32 = std::env::var("ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(100_000);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let resident = || {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    let cpu = || {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    runtime.block_on(async {
        let mut bed = Bed::all(Host::rails(8));
        for _ in 0..1000 {
            assert_eq!(bed.outcome().await, Outcome::Success);
        }
        let live_before = least_live(&mut bed).await;
        let (before, began, cpu_before) = (resident(), tokio::time::Instant::now(), cpu());
        let mut slowest = Duration::ZERO;
        for _ in 0..rounds {
            let round = tokio::time::Instant::now();
            assert_eq!(bed.outcome().await, Outcome::Success);
            slowest = slowest.max(round.elapsed());
        }
        let (each, each_cpu) = (began.elapsed() / rounds, (cpu() - cpu_before) / rounds);
        let after = resident();
        let live_after = least_live(&mut bed).await;
        println!(
            "{rounds} rounds over 8 rails: {each:?} each ({each_cpu:?} of CPU), slowest {slowest:?}; resident {before} KiB, then \
             {after} KiB; allocated {} bytes in {} pieces, then {} in {}",
            live_before.0, live_before.1, live_after.0, live_after.1
        );
        assert_eq!(live_after, live_before, "memory grows");
    });
}
