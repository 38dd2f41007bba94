//! Promise: two agents for one driver, as in a surge update, never fight, and the newest wins.

mod bed;

use bed::{Agent, Bed, eventually, steadily};
use std::time::Duration;
use tokio::time::sleep;

fn second(bed: &Bed) -> Agent {
    Agent::start(bed.command(&[]), bed.at("second.log"))
}

#[tokio::test]
async fn the_new_agent_takes_the_path_and_the_old_ones_end_does_not_remove_it() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let mut old = bed.agent(&[]);
    kubelet.registered().await;
    let first = bed.identity();
    let new = second(&bed);
    eventually("the new one's socket", || bed.identity().is_some() && bed.identity() != first).await;
    let before = bed.identity();
    kubelet.deregistered().await;
    kubelet.registered().await;
    old.logs("standing by").await;
    steadily("no fight", Duration::from_secs(6), || bed.identity() == before).await;
    assert!(old.terminate().await.success());
    sleep(Duration::from_millis(300)).await;
    assert_eq!(bed.identity(), before, "the old one's end leaves the new one's socket");
    assert!(kubelet.since().is_empty());
    drop(new);
}

#[tokio::test]
async fn the_old_agent_takes_over_when_the_new_one_dies_or_leaves() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let old = bed.agent(&[]);
    kubelet.registered().await;
    for end in ["killed", "stopped"] {
        let first = bed.identity();
        let mut new = second(&bed);
        eventually("the new one's socket", || bed.identity().is_some() && bed.identity() != first).await;
        let news = bed.identity();
        new.logs("the kubelet has registered the driver").await;
        // Its word that it stands by may be the one of the round before; its next look is at most some seconds away.
        eventually("standing by", || old.log().matches("standing by").count() >= if end == "killed" { 1 } else { 2 })
            .await;
        if end == "killed" {
            new.kill().await;
        } else {
            assert!(new.terminate().await.success());
        }
        eventually("the old one's socket", || bed.identity().is_some() && bed.identity() != news).await;
        std::fs::remove_file(bed.at("second.log")).unwrap();
    }
}

#[tokio::test]
async fn a_dozen_agents_settle_on_one_socket() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let agents: Vec<Agent> = (0..12).map(|_| bed.agent(&[])).collect();
    eventually("shown", || bed.shown()).await;
    sleep(Duration::from_secs(7)).await;
    let before = bed.identity();
    kubelet.since();
    steadily("settled", Duration::from_secs(6), || bed.identity() == before).await;
    assert!(kubelet.since().is_empty());
    drop(agents);
}
