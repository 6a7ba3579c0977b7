//! The API of streams.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::call::driver_fns;
use crate::capture;
use crate::codes::*;
use crate::context::{self, current};
use crate::engine::{Dep, HostFn, Kind, Op, Stream, StreamCallback};
use crate::state::{State, state};

pub const NON_BLOCKING: u32 = 1;
/// The smaller, the more urgent; the least urgent is 0. Recorded, and without effect.
pub const GREATEST_PRIORITY: i32 = -5;

const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

/// What the NULL stream means to a function: the second is that of the `_ptds` and `_ptsz` variants.
#[derive(Copy, Clone, PartialEq, Eq)]
pub enum Null {
    Legacy,
    PerThread,
}

impl State {
    /// The stream behind a handle.
    pub fn stream(&mut self, handle: usize, null: Null) -> CuResult<Arc<Stream>> {
        let legacy = handle == LEGACY || (handle == 0 && null == Null::Legacy);
        let per_thread = handle == PER_THREAD || (handle == 0 && null == Null::PerThread);
        if legacy {
            Ok(self.current()?.legacy.clone())
        } else if per_thread {
            let cx_handle = current()?;
            let cx = self.current()?;
            let new = || Stream::new(cx_handle, Kind::PerThread, 0, 0);
            Ok(cx.per_thread.entry(context::thread()).or_insert_with(new).clone())
        } else {
            let found = self.streams.get(handle).cloned().ok_or(INVALID_HANDLE)?;
            self.context(found.context)?;
            Ok(found)
        }
    }

    /// Gives work to a stream, or to the capture that the stream takes part in. None when it was captured.
    pub fn submit(&mut self, stream: &Arc<Stream>, op: Op) -> CuResult<Option<Dep>> {
        if capture::take(self, stream, &op)? {
            return Ok(None);
        }
        Ok(Some(self.context(stream.context)?.submit(stream, op, Vec::new())))
    }
}

driver_fns! {
    fn cuStreamCreate(stream: *mut usize, flags: u32) {
        create(stream, flags, 0)
    }

    fn cuStreamCreateWithPriority(stream: *mut usize, flags: u32, priority: c_int) {
        create(stream, flags, priority.clamp(GREATEST_PRIORITY, 0))
    }

    fn cuStreamDestroy(stream: usize) {
        destroy(stream)
    }

    fn cuStreamDestroy_v2(stream: usize) {
        destroy(stream)
    }

    fn cuStreamSynchronize | cuStreamSynchronize_ptsz(stream: usize), null => {
        let mut st = state();
        let stream = st.stream(stream, null)?;
        capture::refuse_on_stream(&st, &stream)?;
        capture::refuse_unsafe(&st)?;
        let deps = everything(&mut st, &stream)?;
        drop(st);
        crate::engine::wait_all(&deps);
        Ok(())
    }

    fn cuStreamQuery | cuStreamQuery_ptsz(stream: usize), null => {
        let mut st = state();
        let stream = st.stream(stream, null)?;
        capture::refuse_on_stream(&st, &stream)?;
        capture::refuse_unsafe(&st)?;
        if everything(&mut st, &stream)?.is_empty() { Ok(()) } else { Err(NOT_READY) }
    }

    fn cuStreamWaitEvent | cuStreamWaitEvent_ptsz(stream: usize, event: usize, flags: u32), null => {
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        let mut st = state();
        let stream = st.stream(stream, null)?;
        if capture::join(&mut st, &stream, event)? {
            return Ok(());
        }
        let deps = st.event(event)?.unfinished();
        if !deps.is_empty() {
            st.context(stream.context)?.submit(&stream, Op::Marker(None), deps);
        }
        Ok(())
    }

    fn cuStreamGetFlags | cuStreamGetFlags_ptsz(stream: usize, flags: *mut u32), null => {
        let set = state().stream(stream, null)?.flags;
        write(flags, set)
    }

    fn cuStreamGetPriority | cuStreamGetPriority_ptsz(stream: usize, priority: *mut c_int), null => {
        let set = state().stream(stream, null)?.priority;
        write(priority, set)
    }

    fn cuStreamGetId | cuStreamGetId_ptsz(stream: usize, id: *mut u64), null => {
        let mut st = state();
        let stream = st.stream(stream, null)?;
        // A real driver refuses this on a stream being captured, in every mode, and the capture is lost (seen on an H200).
        capture::refuse_on_stream(&st, &stream)?;
        write(id, stream.id)
    }

    fn cuStreamGetCtx | cuStreamGetCtx_ptsz(stream: usize, context: *mut usize), null => {
        let found = state().stream(stream, null)?.context;
        write(context, found)
    }

    fn cuStreamGetCtx_v2 | cuStreamGetCtx_v2_ptsz(stream: usize, context: *mut usize, green: *mut usize), null => {
        let found = state().stream(stream, null)?.context;
        write_optional(green, 0);
        write(context, found)
    }

    fn cuStreamGetDevice | cuStreamGetDevice_ptsz(stream: usize, device: *mut c_int), null => {
        let mut st = state();
        let stream = st.stream(stream, null)?;
        let ordinal = st.context(stream.context)?.device;
        write(device, ordinal)
    }

    fn cuStreamAttachMemAsync | cuStreamAttachMemAsync_ptsz(stream: usize, _ptr: u64, _bytes: usize, _flags: u32), null => {
        state().stream(stream, null).map(|_| ())
    }

    fn cuStreamAddCallback | cuStreamAddCallback_ptsz(
        stream: usize, callback: Option<StreamCallback>, data: *mut c_void, flags: u32,
    ), null => {
        let run = callback.ok_or(INVALID_VALUE)?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let mut st = state();
        let target = st.stream(stream, null)?;
        capture::refuse_on_stream(&st, &target)?;
        st.submit(&target, Op::Callback { run, stream, data: data as usize }).map(|_| ())
    }

    fn cuLaunchHostFunc | cuLaunchHostFunc_ptsz(stream: usize, function: Option<HostFn>, data: *mut c_void), null => {
        let run = function.ok_or(INVALID_VALUE)?;
        let mut st = state();
        let stream = st.stream(stream, null)?;
        st.submit(&stream, Op::Host { run, data: data as usize }).map(|_| ())
    }

    fn cuStreamWaitValue32 | cuStreamWaitValue32_ptsz(stream: usize, address: u64, value: u32, flags: u32), null => {
        wait_value(stream, null, address, value as u64, false, flags)
    }

    fn cuStreamWaitValue32_v2 | cuStreamWaitValue32_v2_ptsz(stream: usize, address: u64, value: u32, flags: u32), null => {
        wait_value(stream, null, address, value as u64, false, flags)
    }

    fn cuStreamWaitValue64 | cuStreamWaitValue64_ptsz(stream: usize, address: u64, value: u64, flags: u32), null => {
        wait_value(stream, null, address, value, true, flags)
    }

    fn cuStreamWaitValue64_v2 | cuStreamWaitValue64_v2_ptsz(stream: usize, address: u64, value: u64, flags: u32), null => {
        wait_value(stream, null, address, value, true, flags)
    }

    fn cuStreamWriteValue32 | cuStreamWriteValue32_ptsz(stream: usize, address: u64, value: u32, flags: u32), null => {
        write_value(stream, null, address, value as u64, false, flags)
    }

    fn cuStreamWriteValue32_v2 | cuStreamWriteValue32_v2_ptsz(stream: usize, address: u64, value: u32, flags: u32), null => {
        write_value(stream, null, address, value as u64, false, flags)
    }

    fn cuStreamWriteValue64 | cuStreamWriteValue64_ptsz(stream: usize, address: u64, value: u64, flags: u32), null => {
        write_value(stream, null, address, value, true, flags)
    }

    fn cuStreamWriteValue64_v2 | cuStreamWriteValue64_v2_ptsz(stream: usize, address: u64, value: u64, flags: u32), null => {
        write_value(stream, null, address, value, true, flags)
    }
}

fn create(stream: *mut usize, flags: u32, priority: i32) -> Answer {
    if stream.is_null() || flags & !NON_BLOCKING != 0 {
        return Err(INVALID_VALUE);
    }
    let mut st = state();
    let new = Stream::new(current()?, Kind::User, flags, priority);
    st.current()?.created.push(new.clone());
    let handle = st.streams.insert(new);
    write(stream, handle)
}

/// The work goes on; the handle is the next stream's.
fn destroy(handle: usize) -> Answer {
    let mut st = state();
    let stream = st.stream(handle, Null::Legacy)?;
    if stream.kind != Kind::User {
        return Err(INVALID_HANDLE);
    }
    capture::drop_stream(&mut st, &stream);
    st.streams.remove(handle);
    let cx = st.context(stream.context)?;
    cx.created.retain(|s| !Arc::ptr_eq(s, &stream));
    cx.orphan(&stream);
    Ok(())
}

/// What the host must see done before the stream's work is: for the legacy stream that of the blocking ones too.
fn everything(st: &mut State, stream: &Arc<Stream>) -> CuResult<Vec<Dep>> {
    let cx = st.context(stream.context)?;
    let mut deps: Vec<Dep> = stream.pending().into_iter().collect();
    if stream.kind == Kind::Legacy {
        let others = cx.pending().into_iter().filter(|dep| dep.stream.is_blocking() && dep.stream.id != stream.id);
        deps.extend(others);
    }
    Ok(deps)
}

fn wait_value(stream: usize, null: Null, address: u64, value: u64, wide: bool, flags: u32) -> Answer {
    check_word(address, wide)?;
    let mut st = state();
    let stream = st.stream(stream, null)?;
    st.submit(&stream, Op::Wait { address, value, wide, condition: flags }).map(|_| ())
}

fn write_value(stream: usize, null: Null, address: u64, value: u64, wide: bool, flags: u32) -> Answer {
    check_word(address, wide)?;
    if flags > 1 {
        return Err(INVALID_VALUE);
    }
    let mut st = state();
    let stream = st.stream(stream, null)?;
    st.submit(&stream, Op::Write { address, value, wide }).map(|_| ())
}

fn check_word(address: u64, wide: bool) -> Answer {
    let align = if wide { 8 } else { 4 };
    if address != 0 && address.is_multiple_of(align) { Ok(()) } else { Err(INVALID_VALUE) }
}

/// Waits for work that `State::submit` gave to a stream, if it did.
pub fn finish(submitted: Option<Dep>) {
    if let Some(dep) = submitted {
        dep.wait();
    }
}
