//! The API of events.

use std::sync::Arc;

use crate::call::driver_fns;
use crate::capture;
use crate::codes::*;
use crate::context::current;
use crate::engine::{self, Dep, Op, Stamp};
use crate::state::{State, state};
use crate::stream::Null;

const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

pub struct Event {
    pub context: usize,
    flags: u32,
    /// What the last record covers, as far as it is not known to be complete.
    covers: Vec<Dep>,
    /// When the last record was reached; None before the first.
    stamp: Option<Arc<Stamp>>,
    /// The capture that it was last recorded in.
    pub capture: Option<u64>,
}

impl Event {
    pub fn record(&mut self, covers: Vec<Dep>, stamp: Arc<Stamp>, capture: Option<u64>) {
        self.covers = covers;
        self.stamp = Some(stamp);
        self.capture = capture;
    }

    /// What is left of the work that the last record covers: empty when complete, or never recorded.
    pub fn unfinished(&mut self) -> Vec<Dep> {
        self.covers.retain(|dep| !dep.is_done());
        self.covers.clone()
    }
}

impl State {
    pub fn event(&mut self, handle: usize) -> CuResult<&mut Event> {
        self.events.get_mut(handle).ok_or(INVALID_HANDLE)
    }
}

driver_fns! {
    fn cuEventCreate(event: *mut usize, flags: u32) {
        if event.is_null() || flags & !7 != 0 || (flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0) {
            return Err(INVALID_VALUE);
        }
        let mut st = state();
        st.current()?;
        let handle = st.events.insert(Event { context: current()?, flags, covers: Vec::new(), stamp: None, capture: None });
        write(event, handle)
    }

    fn cuEventDestroy(event: usize) {
        state().events.remove(event).map(|_| ()).ok_or(INVALID_HANDLE)
    }

    fn cuEventDestroy_v2(event: usize) {
        state().events.remove(event).map(|_| ()).ok_or(INVALID_HANDLE)
    }

    fn cuEventRecord | cuEventRecord_ptsz(event: usize, stream: usize), null => {
        record(event, stream, null)
    }

    fn cuEventRecordWithFlags | cuEventRecordWithFlags_ptsz(event: usize, stream: usize, flags: u32), null => {
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        record(event, stream, null)
    }

    fn cuEventQuery(event: usize) {
        let mut st = state();
        capture::refuse_captured(&mut st, event)?;
        capture::refuse_unsafe(&st)?;
        if st.event(event)?.unfinished().is_empty() { Ok(()) } else { Err(NOT_READY) }
    }

    fn cuEventSynchronize(event: usize) {
        let mut st = state();
        capture::refuse_captured(&mut st, event)?;
        capture::refuse_unsafe(&st)?;
        let deps = st.event(event)?.unfinished();
        drop(st);
        engine::wait_all(&deps);
        Ok(())
    }

    fn cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize) {
        elapsed(milliseconds, start, end)
    }

    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: usize, end: usize) {
        elapsed(milliseconds, start, end)
    }
}

fn record(event: usize, stream: usize, null: Null) -> Answer {
    let mut st = state();
    let stream = st.stream(stream, null)?;
    if st.event(event)?.context != stream.context {
        return Err(INVALID_HANDLE);
    }
    let stamp = Arc::new(Stamp::default());
    let covers = st.submit(&stream, Op::Marker(Some(stamp.clone())))?;
    let capture = stream.capture.lock().as_ref().map(|capture| capture.id);
    st.event(event)?.record(covers.into_iter().collect(), stamp, capture);
    Ok(())
}

fn elapsed(milliseconds: *mut f32, start: usize, end: usize) -> Answer {
    let mut st = state();
    let mut times = [0, 0];
    for (time, handle) in times.iter_mut().zip([start, end]) {
        let event = st.event(handle)?;
        if event.flags & DISABLE_TIMING != 0 {
            return Err(INVALID_HANDLE);
        }
        let stamp = event.stamp.clone().ok_or(INVALID_HANDLE)?;
        if !event.unfinished().is_empty() {
            return Err(NOT_READY);
        }
        *time = stamp.nanoseconds();
    }
    write(milliseconds, (times[1] as i64 - times[0] as i64) as f32 / 1e6)
}
