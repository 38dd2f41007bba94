//! Several futures at once, within the task that waits for them.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

/// Waits for all of them; dropping it drops them at once. What they gave, in their order.
pub async fn join_all<F: Future + ?Sized>(futures: Vec<Pin<Box<F>>>) -> Vec<F::Output> {
    let mut running: Vec<_> = futures.into_iter().map(Some).collect();
    let mut given: Vec<Option<F::Output>> = running.iter().map(|_| None).collect();
    poll_fn(|context| {
        let mut waiting = false;
        for (slot, answer) in running.iter_mut().zip(&mut given) {
            if let Some(future) = slot {
                match future.as_mut().poll(context) {
                    Poll::Ready(value) => (*slot, *answer) = (None, Some(value)),
                    Poll::Pending => waiting = true,
                }
            }
        }
        if waiting { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    given.into_iter().flatten().collect()
}
