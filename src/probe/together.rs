//! Several futures within one: they run at the same time, and dropping it drops them all.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

/// A future that is kept with others.
pub type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Waits for every one; what they give, in their order.
pub async fn together<T>(mut running: Vec<Boxed<'_, T>>) -> Vec<T> {
    let mut given: Vec<Option<T>> = running.iter().map(|_| None).collect();
    poll_fn(|context| {
        for (future, given) in running.iter_mut().zip(&mut given) {
            if given.is_none()
                && let Poll::Ready(value) = future.as_mut().poll(context)
            {
                *given = Some(value);
            }
        }
        if given.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    given.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::{Instant, sleep};

    #[tokio::test(start_paused = true)]
    async fn they_run_at_the_same_time_and_keep_their_order() {
        let started = Instant::now();
        let after = |seconds| -> Boxed<'static, u64> {
            Box::pin(async move {
                sleep(Duration::from_secs(seconds)).await;
                seconds
            })
        };
        assert_eq!(together(vec![after(3), after(1), after(2)]).await, [3, 1, 2]);
        assert_eq!(started.elapsed().as_secs(), 3);
        assert!(together::<()>(Vec::new()).await.is_empty());
    }
}
