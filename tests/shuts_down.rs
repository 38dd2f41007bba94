//! Promise: told to stop, it unlinks its socket first and exits 0, wherever it is.

mod bed;

use bed::{Bed, eventually};
use rustix::process::Signal;
use std::time::Duration;
use tokio::time::sleep;

#[tokio::test]
async fn socket_is_gone_after_sigterm_and_after_sigint() {
    let bed = Bed::new();
    let _driver = bed.driver();
    for signal in [Signal::TERM, Signal::INT] {
        let mut agent = bed.agent(&[]);
        eventually("shown", || bed.shown()).await;
        agent.signal(signal);
        assert_eq!(agent.exit().await.code(), Some(0));
        assert!(bed.registration_folder().is_empty());
    }
}

#[tokio::test]
async fn it_stops_while_waiting_for_a_driver() {
    let bed = Bed::new();
    let mut agent = bed.agent(&[]);
    agent.logs("Still connecting").await;
    assert_eq!(agent.terminate().await.code(), Some(0));
}

#[tokio::test]
async fn it_stops_while_a_driver_hangs() {
    let bed = Bed::new();
    let driver = bed.driver();
    let mut agent = bed.agent(&[]);
    eventually("shown", || bed.shown()).await;
    driver.behaviour().delay = Duration::from_secs(3600);
    // The heal asks the driver, which hangs now.
    std::fs::remove_file(bed.registration_socket()).unwrap();
    sleep(Duration::from_millis(500)).await;
    assert_eq!(agent.terminate().await.code(), Some(0));
    assert!(bed.registration_folder().is_empty());
}

#[tokio::test]
async fn an_idle_connection_does_not_delay_the_end_for_long() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut agent = bed.agent(&[]);
    eventually("shown", || bed.shown()).await;
    let _idle = tokio::net::UnixStream::connect(bed.registration_socket()).await.unwrap();
    assert_eq!(agent.terminate().await.code(), Some(0));
}
