//! Connections of callers on which no call is under way: so many at a time. Beyond that the one that is idle for longest is told to
//! go, once that is a while; one with a call never is.

use rustix::process::{Resource, getrlimit};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The kubelet leaves none idle, it opens one for each call. Far more than callers that keep some, and some MB.
const MOST: usize = 1024;

/// Until then its first call, or the next, may be on its way: of a burst of connections none is to lose its call.
const CALL_MAY_COME: Duration = Duration::from_secs(3);

/// Which part of the descriptors that we may have idle connections can take.
const PART: u64 = 4;

/// The idle connections of one listener. Clones are handles to the same ones.
#[derive(Debug, Clone)]
pub(super) struct Idle(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    most: usize,
    waiting: Mutex<Waiting>,
}

/// By the order in which they became idle.
#[derive(Debug, Default)]
struct Waiting {
    connections: BTreeMap<u64, Waits>,
    next: u64,
}

#[derive(Debug)]
struct Waits {
    since: Instant,
    go: CancellationToken,
}

/// One connection, from its beginning to its end. Clones are the same one.
#[derive(Debug, Clone)]
pub(super) struct Connection(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    idle: Idle,
    go: CancellationToken,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    calls: usize,
    /// Its number among the idle ones.
    number: Option<u64>,
}

/// A call on a connection, until it is dropped.
#[derive(Debug)]
pub(super) struct Call(Connection);

impl Idle {
    /// As many as the descriptors of this process allow, and 1024 at most.
    pub(super) fn new() -> Self {
        let part = getrlimit(Resource::Nofile).current.map_or(MOST, |all| usize::try_from(all / PART).unwrap_or(MOST));
        Self::of(part.clamp(1, MOST))
    }

    fn of(most: usize) -> Self {
        Self(Arc::new(Shared { most, waiting: Mutex::default() }))
    }

    /// A new connection, idle until its first call. `go` is cancelled when it has to end.
    pub(super) fn enter(&self, go: CancellationToken) -> Connection {
        let connection = Connection(Arc::new(Inner { idle: self.clone(), go, state: Mutex::default() }));
        connection.rest(&mut connection.state());
        connection
    }

    /// Tells those to go that are too many, if they have been idle for a while. To be called now and then: each connection that becomes
    /// idle asks, too, but after the last of a burst none may come.
    pub(super) fn shed(&self) {
        self.waiting().shed(self.0.most);
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn shed(&mut self, most: usize) {
        while self.connections.len() > most
            && let Some(longest) = self.connections.first_entry()
            && longest.get().since.elapsed() >= CALL_MAY_COME
        {
            longest.remove().go.cancel();
        }
    }
}

impl Connection {
    /// A call begins.
    pub(super) fn call(&self) -> Call {
        let mut state = self.state();
        state.calls += 1;
        if let Some(number) = state.number.take() {
            self.0.idle.waiting().connections.remove(&number);
        }
        Call(self.clone())
    }

    fn rest(&self, state: &mut State) {
        let (idle, mut waiting) = (&self.0.idle, self.0.idle.waiting());
        let number = waiting.next;
        waiting.next += 1;
        waiting.connections.insert(number, Waits { since: Instant::now(), go: self.0.go.clone() });
        state.number = Some(number);
        waiting.shed(idle.0.most);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.calls -= 1;
        if state.calls == 0 {
            self.0.rest(&mut state);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(number) = self.state.get_mut().unwrap_or_else(PoisonError::into_inner).number {
            self.idle.waiting().connections.remove(&number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn the_longest_idle_goes_and_one_with_a_call_never() {
        let idle = Idle::of(2);
        let enter = || {
            let go = CancellationToken::new();
            (idle.enter(go.clone()), go)
        };
        let (busy, of_busy) = enter();
        let calls = [busy.call(), busy.call()];
        let (first, of_first) = enter();
        let (_second, of_second) = enter();
        advance(CALL_MAY_COME).await;
        assert!(!of_first.is_cancelled());
        // Idle anew, and so no longer for the longest time.
        drop(first.call());
        let (third, of_third) = enter();
        assert!(of_second.is_cancelled() && !of_first.is_cancelled() && !of_third.is_cancelled());
        drop(third);
        let [one, other] = calls;
        drop(one);
        assert_eq!(idle.waiting().connections.len(), 1, "the first; the busy one has a call left");
        drop(other);
        advance(CALL_MAY_COME).await;
        let _fourth = enter();
        assert!(of_first.is_cancelled() && !of_busy.is_cancelled());
        drop(first);
        assert_eq!(idle.waiting().connections.len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn of_a_burst_none_goes_before_its_call_can_have_come() {
        let idle = Idle::of(2);
        let burst = [(); 5].map(|()| {
            let go = CancellationToken::new();
            (idle.enter(go.clone()), go)
        });
        let gone = || burst.iter().filter(|(_, go)| go.is_cancelled()).count();
        advance(CALL_MAY_COME - Duration::from_millis(1)).await;
        idle.shed();
        assert_eq!(gone(), 0);
        let call = burst[0].0.call();
        advance(Duration::from_millis(1)).await;
        idle.shed();
        assert_eq!(gone(), 2, "of four that are idle");
        drop(call);
        assert!(!burst[0].1.is_cancelled());
    }

    #[test]
    fn connections_that_end_leave_nothing() {
        let idle = Idle::new();
        for _ in 0..1000 {
            drop(idle.enter(CancellationToken::new()).call());
        }
        assert!(idle.waiting().connections.is_empty());
        assert!((1..=MOST).contains(&idle.0.most));
    }
}
