//! The life cycle of the registration socket: what the kubelet, the driver and the folder tell us, and what we do about it.

use super::backoff::Backoff;
use std::time::{Duration, Instant};

/// The kubelet's loops and deadlines that our own waits follow.
#[derive(Debug, Clone)]
pub struct RegistrationTimings {
    /// At least this long between a withdrawal and the next publication, so that the kubelet's reconciler (one pass a
    /// second) sees both.
    pub pause: Duration,
    /// A shown socket on which no GetInfo came is published again after this; doubles each time.
    pub patience: Duration,
    /// What the doubling of waits stops at.
    pub max_wait: Duration,
    /// After a GetInfo the kubelet may spend 2 min in NodeGetInfo and some seconds more on the API.
    pub notify_wait: Duration,
    /// After a refusal the kubelet comes back by itself, at most 2 min 2 s later. Silence beyond this is not a retry.
    pub refusal_wait: Duration,
    /// First pause before asking a driver again that did not answer; doubles to `max_driver_pause`.
    pub driver_pause: Duration,
    /// What the driver's pauses stop at.
    pub max_driver_pause: Duration,
}

impl Default for RegistrationTimings {
    fn default() -> Self {
        Self {
            pause: Duration::from_millis(1500),
            patience: Duration::from_secs(10),
            max_wait: Duration::from_secs(120),
            notify_wait: Duration::from_secs(130),
            refusal_wait: Duration::from_secs(300),
            driver_pause: Duration::from_millis(250),
            max_driver_pause: Duration::from_secs(10),
        }
    }
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The verdict allows the driver to be seen.
    Wanted,
    /// The verdict forbids it.
    Unwanted,
    /// The driver answered NodeGetInfo: the kubelet would accept it.
    DriverAnswered,
    /// It did not.
    DriverFailed,
    /// Our socket is at the path, open to the kubelet.
    Published,
    /// It could not be put there.
    PublishFailed,
    /// The kubelet asked GetInfo.
    GetInfo,
    /// The kubelet said: registered.
    Accepted,
    /// The kubelet said: not registered.
    Refused,
    /// A look at the path.
    Path(PathState),
    /// Time has passed; see [`Registration::deadline`].
    Tick,
}

/// What holds the path of the registration socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathState {
    /// Our own socket.
    Ours,
    /// Nothing.
    Gone,
    /// A socket that nobody serves.
    Dead,
    /// A socket that another process serves: our successor in a surge update.
    Held,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Ask the driver's NodeGetInfo, then report [`Event::DriverAnswered`] or [`Event::DriverFailed`].
    AskDriver,
    /// Put our socket at the path, then report what came of it.
    Publish(Rival),
    /// Unlink our socket, and a dead one in its place.
    Withdraw,
}

/// What a publication does to a live socket of another process at the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rival {
    /// We are the newest: take its place.
    Displace,
    /// It may be newer than we are: leave it and report [`PathState::Held`].
    Yield,
}

/// Where we are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Not to be seen. Left when wanted, not before `not_before`.
    Hidden {
        /// End of the pause after a withdrawal.
        not_before: Option<Instant>,
    },
    /// To be seen; the driver is asked first, at `at` or just now (`None`). Left when it answers.
    Asking {
        /// When to ask again.
        at: Option<Instant>,
    },
    /// The driver answered and our socket goes to the path. Left when that is done, or tried again at `at`.
    Publishing {
        /// When to try again, after a failure.
        at: Option<Instant>,
    },
    /// Shown; the kubelet has not asked yet. Left on GetInfo, or `until` to publish again.
    Shown {
        /// End of our patience.
        until: Instant,
    },
    /// The kubelet asked GetInfo and is at work. Left on its verdict, or `until` to publish again.
    Answered {
        /// End of our patience.
        until: Instant,
    },
    /// The kubelet has the driver. Left when withdrawn, refused, or when the path is lost.
    Registered,
    /// The kubelet refused and will try again by itself. Left on acceptance, or `until` to publish again.
    Refused {
        /// End of our patience.
        until: Instant,
    },
    /// A live socket of another process is at our path. Left when it is gone or dead.
    StandingBy,
}

/// The state and the memory that outlives it.
#[derive(Debug)]
pub struct Registration {
    state: State,
    since: Instant,
    timings: RegistrationTimings,
    /// What the verdict says, once there is one.
    wanted: Option<bool>,
    /// We had the path once: who holds it now is newer than we are.
    had_the_path: bool,
    /// Our socket is at the path as far as we know, whatever else is going on.
    shown: bool,
    confirmed: bool,
    patience: Backoff,
    driver_pauses: Backoff,
    publish_pauses: Backoff,
    heals: Backoff,
    last_publish: Option<Instant>,
}

impl Registration {
    /// Hidden, until wanted.
    pub fn new(timings: RegistrationTimings, now: Instant) -> Self {
        Self {
            state: State::Hidden { not_before: None },
            since: now,
            wanted: None,
            had_the_path: false,
            shown: false,
            confirmed: false,
            patience: Backoff::new(timings.patience, timings.max_wait),
            driver_pauses: Backoff::new(timings.driver_pause, timings.max_driver_pause),
            publish_pauses: Backoff::new(timings.driver_pause, timings.max_driver_pause),
            heals: Backoff::new(timings.pause, timings.max_wait),
            last_publish: None,
            timings,
        }
    }

    /// Where we are.
    pub fn state(&self) -> State {
        self.state
    }

    /// Since when.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// Whether the verdict allows the driver to be seen; `None` before there is one.
    pub fn wanted(&self) -> Option<bool> {
        self.wanted
    }

    /// Whether our socket is at the path, as far as we know.
    pub fn shown(&self) -> bool {
        self.shown
    }

    /// Whether the kubelet has confirmed us at least once.
    pub fn confirmed(&self) -> bool {
        self.confirmed
    }

    /// When to report [`Event::Tick`].
    pub fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Hidden { not_before } => not_before.filter(|_| self.wanted == Some(true)),
            State::Asking { at } | State::Publishing { at } => at,
            State::Shown { until } | State::Answered { until } | State::Refused { until } => Some(until),
            State::Registered | State::StandingBy => None,
        }
    }

    /// Takes in what happened; returns what to do.
    pub fn on(&mut self, event: Event, now: Instant) -> Option<Action> {
        match event {
            Event::Wanted => self.wanted = Some(true),
            Event::Unwanted => self.wanted = Some(false),
            Event::DriverAnswered => self.driver_pauses.reset(),
            Event::Published => {
                self.had_the_path = true;
                self.shown = true;
                self.publish_pauses.reset();
                self.last_publish = Some(now);
            }
            Event::Accepted => self.patience.reset(),
            Event::Path(path) => self.shown &= path == PathState::Ours,
            Event::DriverFailed | Event::PublishFailed | Event::GetInfo | Event::Refused | Event::Tick => {}
        }
        let (state, action) = self.next(event, now);
        if std::mem::discriminant(&state) != std::mem::discriminant(&self.state) {
            self.since = now;
        }
        self.state = state;
        self.shown &= action != Some(Action::Withdraw);
        self.confirmed |= state == State::Registered;
        action
    }

    fn next(&mut self, event: Event, now: Instant) -> (State, Option<Action>) {
        use self::PathState::{Dead, Gone, Held, Ours};
        let ask = (State::Asking { at: None }, Some(Action::AskDriver));
        let hide = (State::Hidden { not_before: Some(now + self.timings.pause) }, Some(Action::Withdraw));
        let stay = (self.state, None);
        match (self.state, event) {
            (State::Hidden { not_before }, Event::Wanted | Event::Tick) => match not_before {
                Some(at) if at > now => stay,
                _ if self.wanted == Some(true) => ask,
                _ => stay,
            },
            // At the first verdict a dead socket of our last life may still be there.
            (State::Hidden { not_before: None }, Event::Unwanted) => hide,
            (State::Hidden { .. }, Event::Unwanted) => stay,
            // The withdrawal failed, or another agent died and left its socket: the kubelet still has the driver.
            (State::Hidden { .. }, Event::Path(Ours | Dead)) if self.wanted == Some(false) => {
                (self.state, Some(Action::Withdraw))
            }
            // A kubelet call that was on its way when we withdrew, or the end of a question that no longer matters.
            (
                State::Hidden { .. },
                Event::DriverAnswered
                | Event::DriverFailed
                | Event::Published
                | Event::PublishFailed
                | Event::GetInfo
                | Event::Accepted
                | Event::Refused
                | Event::Path(_),
            ) => stay,

            (
                State::Asking { .. } | State::Publishing { .. } | State::Shown { .. } | State::Answered { .. },
                Event::Unwanted,
            )
            | (State::Registered | State::Refused { .. } | State::StandingBy, Event::Unwanted) => hide,

            // Patience was at its end and the kubelet came after all.
            (State::Asking { .. } | State::Publishing { .. }, Event::Accepted) if self.shown => {
                (State::Registered, None)
            }
            (State::Asking { .. } | State::Publishing { .. }, Event::Refused) if self.shown => {
                (State::Refused { until: now + self.timings.refusal_wait }, None)
            }
            (State::Asking { .. } | State::Publishing { .. }, Event::GetInfo) if self.shown => {
                (State::Answered { until: now + self.timings.notify_wait }, None)
            }

            (State::Asking { .. }, Event::DriverAnswered) => self.publish(),
            (State::Asking { .. }, Event::DriverFailed) => {
                (State::Asking { at: Some(now + self.driver_pauses.pause()) }, None)
            }
            (State::Asking { at }, Event::Tick) => match at {
                Some(at) if at <= now => ask,
                _ => stay,
            },
            (State::Asking { .. }, Event::Path(Held)) if self.had_the_path => (State::StandingBy, None),
            (
                State::Asking { .. },
                Event::Wanted
                | Event::Published
                | Event::PublishFailed
                | Event::GetInfo
                | Event::Accepted
                | Event::Refused
                | Event::Path(_),
            ) => stay,

            (State::Publishing { .. }, Event::Published) => self.wait_for_kubelet(now),
            (State::Publishing { .. }, Event::PublishFailed) => {
                (State::Publishing { at: Some(now + self.publish_pauses.pause()) }, None)
            }
            (State::Publishing { .. }, Event::Path(Held)) => (State::StandingBy, None),
            (State::Publishing { at }, Event::Tick) => match at {
                Some(at) if at <= now => ask,
                _ => stay,
            },
            (
                State::Publishing { .. },
                Event::Wanted
                | Event::DriverAnswered
                | Event::DriverFailed
                | Event::GetInfo
                | Event::Accepted
                | Event::Refused
                | Event::Path(Ours | Gone | Dead),
            ) => stay,

            (State::Shown { .. } | State::Refused { .. } | State::Registered, Event::Path(Gone | Dead))
            | (State::Answered { .. }, Event::Path(Gone | Dead)) => self.heal(now),
            (State::Shown { .. } | State::Refused { .. } | State::Registered, Event::Path(Held))
            | (State::Answered { .. }, Event::Path(Held)) => (State::StandingBy, None),

            (
                State::Shown { .. } | State::Answered { .. } | State::Refused { .. } | State::Registered,
                Event::Accepted,
            ) => (State::Registered, None),
            (
                State::Shown { .. } | State::Answered { .. } | State::Refused { .. } | State::Registered,
                Event::Refused,
            ) => (State::Refused { until: now + self.timings.refusal_wait }, None),
            (State::Shown { .. } | State::Answered { .. }, Event::GetInfo) => {
                (State::Answered { until: now + self.timings.notify_wait }, None)
            }
            // The kubelet's own retry, or a kubelet that started again: what it had, it has until it says otherwise.
            (State::Refused { .. }, Event::GetInfo) => {
                (State::Refused { until: now + self.timings.refusal_wait }, None)
            }
            (State::Registered, Event::GetInfo) => stay,
            (State::Shown { until } | State::Answered { until } | State::Refused { until }, Event::Tick)
                if until <= now =>
            {
                // A new socket over the old one: whoever looks always finds one. To the kubelet it is a new registration.
                ask
            }
            (
                State::Shown { .. } | State::Answered { .. } | State::Refused { .. } | State::Registered,
                Event::Tick
                | Event::Wanted
                | Event::DriverAnswered
                | Event::DriverFailed
                | Event::Published
                | Event::PublishFailed
                | Event::Path(Ours),
            ) => stay,

            (State::StandingBy, Event::Path(Gone | Dead)) => self.heal(now),
            (
                State::StandingBy,
                Event::Wanted
                | Event::DriverAnswered
                | Event::DriverFailed
                | Event::Published
                | Event::PublishFailed
                | Event::GetInfo
                | Event::Accepted
                | Event::Refused
                | Event::Path(Ours | Held)
                | Event::Tick,
            ) => stay,
        }
    }

    fn publish(&self) -> (State, Option<Action>) {
        let rival = if self.had_the_path { Rival::Yield } else { Rival::Displace };
        (State::Publishing { at: None }, Some(Action::Publish(rival)))
    }

    fn wait_for_kubelet(&mut self, now: Instant) -> (State, Option<Action>) {
        (State::Shown { until: now + self.patience.pause() }, None)
    }

    /// The path was lost: at once after a calm time, with growing pauses when someone keeps taking it.
    fn heal(&mut self, now: Instant) -> (State, Option<Action>) {
        let calm = self.last_publish.is_none_or(|at| now.saturating_duration_since(at) > self.timings.max_wait);
        if calm {
            self.heals.reset();
        }
        (State::Asking { at: Some(now + if calm { Duration::ZERO } else { self.heals.pause() }) }, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::some_instant;
    use proptest::prelude::*;

    fn registration() -> (Registration, Instant) {
        let now = some_instant();
        (Registration::new(RegistrationTimings::default(), now), now)
    }

    fn registered() -> (Registration, Instant) {
        let (mut registration, now) = registration();
        registration.on(Event::Wanted, now);
        registration.on(Event::DriverAnswered, now);
        registration.on(Event::Published, now);
        registration.on(Event::GetInfo, now);
        registration.on(Event::Accepted, now);
        assert_eq!(registration.state(), State::Registered);
        (registration, now)
    }

    #[test]
    fn socket_is_shown_only_after_the_driver_answered() {
        let (mut registration, now) = registration();
        assert_eq!(registration.on(Event::Wanted, now), Some(Action::AskDriver));
        assert_eq!(registration.on(Event::DriverFailed, now), None);
        let retry = registration.deadline().unwrap();
        assert_eq!(registration.on(Event::Tick, retry), Some(Action::AskDriver));
        assert_eq!(registration.on(Event::DriverAnswered, retry), Some(Action::Publish(Rival::Displace)));
    }

    #[test]
    fn registered_means_the_kubelet_said_so() {
        let (mut registration, now) = registration();
        registration.on(Event::Wanted, now);
        registration.on(Event::DriverAnswered, now);
        registration.on(Event::Published, now);
        assert!(!registration.confirmed());
        registration.on(Event::GetInfo, now);
        assert!(!registration.confirmed() && registration.state() != State::Registered);
        registration.on(Event::Accepted, now);
        assert!(registration.confirmed() && registration.state() == State::Registered);
    }

    #[test]
    fn unwanted_withdraws_from_every_state() {
        let states: [&[Event]; 7] = [
            &[],
            &[Event::DriverAnswered],
            &[Event::DriverAnswered, Event::Published],
            &[Event::DriverAnswered, Event::Published, Event::GetInfo],
            &[Event::DriverAnswered, Event::Published, Event::GetInfo, Event::Accepted],
            &[Event::DriverAnswered, Event::Published, Event::GetInfo, Event::Refused],
            &[Event::DriverAnswered, Event::Published, Event::Path(PathState::Held)],
        ];
        for events in states {
            let (mut registration, now) = registration();
            registration.on(Event::Wanted, now);
            for &event in events {
                registration.on(event, now);
            }
            assert_eq!(registration.on(Event::Unwanted, now), Some(Action::Withdraw), "{events:?}");
            assert!(matches!(registration.state(), State::Hidden { .. }));
        }
    }

    #[test]
    fn a_dead_socket_of_the_last_life_is_withdrawn_when_the_first_verdict_is_unhealthy() {
        let (mut registration, now) = registration();
        assert_eq!(registration.on(Event::Unwanted, now), Some(Action::Withdraw));
        assert_eq!(registration.on(Event::Unwanted, now), None);
    }

    #[test]
    fn a_socket_that_is_still_there_after_the_withdrawal_is_withdrawn_again() {
        let (mut registration, now) = registered();
        registration.on(Event::Unwanted, now);
        for path in [PathState::Ours, PathState::Dead] {
            assert_eq!(registration.on(Event::Path(path), now), Some(Action::Withdraw));
        }
        for path in [PathState::Gone, PathState::Held] {
            assert_eq!(registration.on(Event::Path(path), now), None);
        }
        registration.on(Event::Wanted, now);
        assert_eq!(registration.on(Event::Path(PathState::Dead), now), None, "it is about to be replaced");
    }

    #[test]
    fn republication_waits_for_the_kubelets_reconciler() {
        let (mut registration, now) = registered();
        registration.on(Event::Unwanted, now);
        assert_eq!(registration.on(Event::Wanted, now + Duration::from_millis(1499)), None);
        let at = registration.deadline().unwrap();
        assert_eq!(at, now + Duration::from_millis(1500));
        assert_eq!(registration.on(Event::Tick, at), Some(Action::AskDriver));
    }

    #[test]
    fn silence_after_showing_publishes_again_with_growing_patience() {
        let (mut registration, mut now) = registration();
        registration.on(Event::Wanted, now);
        let mut waits = Vec::new();
        for _ in 0..6 {
            assert!(matches!(registration.on(Event::DriverAnswered, now), Some(Action::Publish(_))));
            registration.on(Event::Published, now);
            let until = registration.deadline().unwrap();
            waits.push((until - now).as_secs());
            now = until;
            assert_eq!(registration.on(Event::Tick, now), Some(Action::AskDriver));
        }
        assert_eq!(waits, [10, 20, 40, 80, 120, 120]);
    }

    #[test]
    fn a_kubelet_that_comes_at_the_end_of_our_patience_is_not_published_over() {
        let (mut registration, now) = registration();
        for event in [Event::Wanted, Event::DriverAnswered, Event::Published] {
            registration.on(event, now);
        }
        let until = registration.deadline().unwrap();
        assert_eq!(registration.on(Event::Tick, until), Some(Action::AskDriver));
        registration.on(Event::GetInfo, until);
        assert_eq!(registration.on(Event::DriverAnswered, until), None);
        registration.on(Event::Accepted, until);
        assert_eq!(registration.state(), State::Registered);
    }

    #[test]
    fn after_a_get_info_the_kubelet_gets_its_two_minutes() {
        let (mut registration, now) = registration();
        for event in [Event::Wanted, Event::DriverAnswered, Event::Published, Event::GetInfo] {
            registration.on(event, now);
        }
        assert_eq!(registration.on(Event::Tick, now + Duration::from_secs(129)), None);
        assert_eq!(registration.on(Event::Tick, now + Duration::from_secs(130)), Some(Action::AskDriver));
    }

    #[test]
    fn refusal_leaves_the_socket_to_the_kubelets_own_retries() {
        let (mut registration, mut now) = registered();
        assert_eq!(registration.on(Event::Refused, now), None);
        for _ in 0..100 {
            now += Duration::from_secs(122);
            assert_eq!(registration.on(Event::Tick, now), None);
            assert_eq!(registration.on(Event::GetInfo, now), None);
            assert_eq!(registration.on(Event::Refused, now), None);
        }
        registration.on(Event::Accepted, now);
        assert_eq!(registration.state(), State::Registered);
    }

    #[test]
    fn kubelet_restart_keeps_the_registration() {
        let (mut registration, now) = registered();
        assert_eq!(registration.on(Event::GetInfo, now), None);
        assert_eq!(registration.state(), State::Registered);
    }

    #[test]
    fn lost_path_is_healed_at_once_after_a_calm_time_and_with_growing_pauses_in_a_fight() {
        let (mut registration, start) = registered();
        let mut now = start + Duration::from_secs(3600);
        let mut pauses = Vec::new();
        for _ in 0..5 {
            registration.on(Event::Path(PathState::Gone), now);
            let at = registration.deadline().unwrap();
            pauses.push((at - now).as_millis());
            now = at;
            assert_eq!(registration.on(Event::Tick, now), Some(Action::AskDriver));
            registration.on(Event::DriverAnswered, now);
            registration.on(Event::Published, now);
            registration.on(Event::Accepted, now);
        }
        assert_eq!(pauses, [0, 1500, 3000, 6000, 12000]);
    }

    #[test]
    fn a_publication_that_keeps_failing_is_tried_less_and_less_often() {
        let (mut registration, mut now) = registration();
        registration.on(Event::Wanted, now);
        let mut pauses = Vec::new();
        for _ in 0..8 {
            registration.on(Event::DriverAnswered, now);
            registration.on(Event::PublishFailed, now);
            let at = registration.deadline().unwrap();
            pauses.push((at - now).as_millis());
            now = at;
            assert_eq!(registration.on(Event::Tick, now), Some(Action::AskDriver));
        }
        assert_eq!(pauses, [250, 500, 1000, 2000, 4000, 8000, 10_000, 10_000]);
    }

    #[test]
    fn a_live_successor_is_never_displaced_and_its_death_is_noticed() {
        let (mut registration, now) = registered();
        assert_eq!(registration.on(Event::Path(PathState::Held), now), None);
        assert_eq!(registration.state(), State::StandingBy);
        for event in [Event::Tick, Event::Wanted, Event::GetInfo, Event::Accepted, Event::Path(PathState::Held)] {
            assert_eq!(registration.on(event, now), None);
            assert_eq!(registration.state(), State::StandingBy);
        }
        registration.on(Event::Path(PathState::Dead), now);
        let at = registration.deadline().unwrap();
        assert_eq!(registration.on(Event::Tick, at), Some(Action::AskDriver));
        assert_eq!(registration.on(Event::DriverAnswered, at), Some(Action::Publish(Rival::Yield)));
    }

    #[test]
    fn the_newest_displaces_the_live_one_it_finds() {
        let (mut registration, now) = registration();
        registration.on(Event::Wanted, now);
        assert_eq!(registration.on(Event::Path(PathState::Held), now), None);
        assert_eq!(registration.on(Event::DriverAnswered, now), Some(Action::Publish(Rival::Displace)));
    }

    fn any_event() -> impl Strategy<Value = Event> {
        prop_oneof![
            Just(Event::Wanted),
            Just(Event::Unwanted),
            Just(Event::DriverAnswered),
            Just(Event::DriverFailed),
            Just(Event::Published),
            Just(Event::PublishFailed),
            Just(Event::GetInfo),
            Just(Event::Accepted),
            Just(Event::Refused),
            Just(Event::Path(PathState::Ours)),
            Just(Event::Path(PathState::Gone)),
            Just(Event::Path(PathState::Dead)),
            Just(Event::Path(PathState::Held)),
            Just(Event::Tick),
        ]
    }

    proptest! {
        /// Whatever happens in whatever order: nothing is published while unwanted or within the pause after a withdrawal, and
        /// once wanted there is always something that can still lead to a registration (a deadline, a question in flight, or
        /// the folder or the kubelet to wait for).
        #[test]
        fn never_shown_while_unwanted_never_stuck_while_wanted(
            events in proptest::collection::vec((any_event(), 0_u64..200_000), 1..200)
        ) {
            let (mut registration, mut now) = registration();
            let mut withdrawn_at = None;
            for (event, gap_ms) in events {
                now += Duration::from_millis(gap_ms);
                let action = registration.on(event, now);
                match action {
                    Some(Action::Publish(_)) => {
                        prop_assert!(registration.wanted() == Some(true));
                        prop_assert!(withdrawn_at.is_none_or(|at| now >= at + Duration::from_millis(1500)));
                    }
                    Some(Action::Withdraw) => withdrawn_at = Some(now),
                    Some(Action::AskDriver) | None => {}
                }
                if registration.wanted() == Some(true) {
                    let waiting_for_an_answer = matches!(
                        registration.state(),
                        State::Asking { at: None } | State::Publishing { at: None } | State::Registered | State::StandingBy
                    );
                    prop_assert!(waiting_for_an_answer || registration.deadline().is_some());
                }
            }
        }
    }
}
