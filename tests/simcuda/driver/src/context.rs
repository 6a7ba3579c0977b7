//! Contexts: primary and created ones, the calling thread's stack of them, fences over a whole context.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::call::{self, driver_fns};
use crate::capture;
use crate::codes::*;
use crate::device::check;
use crate::engine::{self, Dep, Kind, Op, Stamp, Stream};
use crate::memory;
use crate::state::{State, state};

pub struct Context {
    pub id: u64,
    pub device: i32,
    pub flags: u32,
    pub primary: bool,
    pub legacy: Arc<Stream>,
    pub per_thread: HashMap<u64, Arc<Stream>>,
    /// Streams that the program created and has not destroyed.
    pub created: Vec<Arc<Stream>>,
    /// Unfinished work of streams that were destroyed.
    pub orphans: Vec<Dep>,
    /// What all later work waits for (`cuCtxWaitEvent`), and how often that grew.
    barrier: Vec<Dep>,
    barrier_number: u64,
    peers: HashSet<usize>,
    limits: HashMap<c_int, usize>,
}

impl Context {
    fn new(handle: usize, id: u64, device: i32, flags: u32, primary: bool) -> Context {
        Context {
            id,
            device,
            flags,
            primary,
            legacy: Stream::new(handle, Kind::Legacy, 0, 0),
            per_thread: HashMap::new(),
            created: Vec::new(),
            orphans: Vec::new(),
            barrier: Vec::new(),
            barrier_number: 0,
            peers: HashSet::new(),
            limits: HashMap::new(),
        }
    }

    fn streams(&self) -> impl Iterator<Item = &Arc<Stream>> {
        std::iter::once(&self.legacy).chain(self.per_thread.values()).chain(&self.created)
    }

    /// Unfinished work of every stream, destroyed ones too.
    pub fn pending(&self) -> Vec<Dep> {
        let orphans = self.orphans.iter().filter(|dep| !dep.is_done()).cloned();
        self.streams().filter_map(Stream::pending).chain(orphans).collect()
    }

    /// Gives work to a stream of this context: after what it is told, after the context's barrier, and by the legacy
    /// stream's rules after what the other blocking streams hold.
    pub fn submit(&mut self, stream: &Arc<Stream>, op: Op, mut after: Vec<Dep>) -> Dep {
        if stream.barrier_seen.swap(self.barrier_number, Ordering::Relaxed) < self.barrier_number {
            self.barrier.retain(|dep| !dep.is_done());
            after.extend(self.barrier.iter().cloned());
        }
        if stream.kind == Kind::Legacy {
            self.orphans.retain(|dep| !dep.is_done());
            after.extend(
                self.streams().filter(|s| s.is_blocking() && s.kind != Kind::Legacy).filter_map(Stream::pending),
            );
            after.extend(self.orphans.iter().filter(|dep| dep.stream.is_blocking()).cloned());
        } else if stream.is_blocking() {
            after.extend(self.legacy.pending());
        }
        stream.push(op, after)
    }

    pub fn orphan(&mut self, stream: &Arc<Stream>) {
        self.orphans.retain(|dep| !dep.is_done());
        self.orphans.extend(stream.pending());
    }
}

thread_local! {
    /// The contexts pushed on this thread, the current one last. Without a destructor: exit handlers run after those of the
    /// main thread, and still have their context.
    static STACK: ManuallyDrop<RefCell<Vec<usize>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
    static THREAD: Thread = Thread::new();
}

/// Names a thread, and tidies its per-thread streams away when it ends.
struct Thread(u64);

impl Thread {
    fn new() -> Thread {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Thread(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        if call::exiting() || call::forked() {
            return;
        }
        for cx in state().contexts.iter_mut() {
            if let Some(stream) = cx.per_thread.remove(&self.0) {
                cx.orphan(&stream);
            }
        }
    }
}

/// The calling thread's number, unique for the life of the process.
pub fn thread() -> u64 {
    // A call from a thread-local destructor that runs after ours: no thread is 0, and nothing is kept for it.
    THREAD.try_with(|thread| thread.0).unwrap_or(0)
}

fn with_stack<T>(f: impl FnOnce(&mut Vec<usize>) -> T) -> T {
    STACK.with(|stack| f(&mut stack.borrow_mut()))
}

/// The calling thread's current context, alive or not; 201 when it has none.
pub fn current() -> CuResult<usize> {
    with_stack(|stack| stack.last().copied()).ok_or(INVALID_CONTEXT)
}

impl State {
    /// A context that is alive; 709 when it is no more, 201 when it never was.
    pub fn context(&mut self, handle: usize) -> CuResult<&mut Context> {
        let known = self.contexts.knows(handle);
        self.contexts.get_mut(handle).ok_or(if known { CONTEXT_IS_DESTROYED } else { INVALID_CONTEXT })
    }

    pub fn current(&mut self) -> CuResult<&mut Context> {
        self.context(current()?)
    }
}

driver_fns! {
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) {
        check(device)?;
        let mut st = state();
        let handle = retain_primary(&mut st, device);
        write(context, handle)
    }

    fn cuDevicePrimaryCtxRelease(device: c_int) {
        release_primary(device)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        release_primary(device)
    }

    fn cuDevicePrimaryCtxReset(device: c_int) {
        reset_primary(device)
    }

    fn cuDevicePrimaryCtxReset_v2(device: c_int) {
        reset_primary(device)
    }

    fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut u32, active: *mut c_int) {
        check(device)?;
        let mut st = state();
        let (set, handle) = { let primary = &st.device(device).primary; (primary.flags, primary.handle) };
        write_optional(flags, set);
        write_optional(active, st.contexts.get(handle).is_some() as c_int);
        Ok(())
    }

    fn cuDevicePrimaryCtxSetFlags(device: c_int, flags: u32) {
        set_primary_flags(device, flags)
    }

    fn cuDevicePrimaryCtxSetFlags_v2(device: c_int, flags: u32) {
        set_primary_flags(device, flags)
    }

    fn cuCtxCreate_v2(context: *mut usize, flags: u32, device: c_int) {
        create(context, flags, device)
    }

    fn cuCtxCreate_v3(context: *mut usize, _affinity: *mut c_void, _count: c_int, flags: u32, device: c_int) {
        create(context, flags, device)
    }

    fn cuCtxCreate_v4(context: *mut usize, _parameters: *mut c_void, flags: u32, device: c_int) {
        create(context, flags, device)
    }

    fn cuCtxDestroy(context: usize) {
        destroy(context)
    }

    fn cuCtxDestroy_v2(context: usize) {
        destroy(context)
    }

    fn cuCtxGetCurrent(context: *mut usize) {
        write(context, current().unwrap_or(0))
    }

    fn cuCtxSetCurrent(context: usize) {
        if context != 0 {
            state().context(context)?;
        }
        with_stack(|stack| {
            stack.pop();
            if context != 0 {
                stack.push(context);
            }
        });
        Ok(())
    }

    fn cuCtxPushCurrent(context: usize) {
        push(context)
    }

    fn cuCtxPushCurrent_v2(context: usize) {
        push(context)
    }

    fn cuCtxPopCurrent(context: *mut usize) {
        pop(context)
    }

    fn cuCtxPopCurrent_v2(context: *mut usize) {
        pop(context)
    }

    fn cuCtxGetDevice(device: *mut c_int) {
        let ordinal = state().current()?.device;
        write(device, ordinal)
    }

    fn cuCtxGetId(context: usize, id: *mut u64) {
        let mut st = state();
        let found = st.context(if context == 0 { current()? } else { context })?.id;
        write(id, found)
    }

    fn cuCtxGetFlags(flags: *mut u32) {
        let set = state().current()?.flags;
        write(flags, set)
    }

    fn cuCtxGetApiVersion(context: usize, version: *mut u32) {
        state().context(if context == 0 { current()? } else { context })?;
        write(version, 3020)
    }

    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        state().current()?;
        write_optional(least, 0);
        write_optional(greatest, crate::stream::GREATEST_PRIORITY);
        Ok(())
    }

    fn cuCtxGetLimit(value: *mut usize, limit: c_int) {
        let mut st = state();
        let set = st.current()?.limits.get(&limit).copied();
        write(value, set.or(default_limit(limit)).ok_or(UNSUPPORTED_LIMIT)?)
    }

    fn cuCtxSetLimit(limit: c_int, value: usize) {
        default_limit(limit).ok_or(UNSUPPORTED_LIMIT)?;
        state().current()?.limits.insert(limit, value);
        Ok(())
    }

    fn cuCtxSynchronize() {
        synchronize(current()?)
    }

    fn cuCtxSynchronize_v2(context: usize) {
        synchronize(if context == 0 { current()? } else { context })
    }

    fn cuCtxEnablePeerAccess(peer: usize, flags: u32) {
        let mut st = state();
        let other = st.context(peer)?.device;
        let cx = st.current()?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if other == cx.device {
            return Err(INVALID_DEVICE);
        }
        if cx.peers.insert(peer) { Ok(()) } else { Err(PEER_ACCESS_ALREADY_ENABLED) }
    }

    fn cuCtxDisablePeerAccess(peer: usize) {
        let mut st = state();
        st.context(peer)?;
        if st.current()?.peers.remove(&peer) { Ok(()) } else { Err(PEER_ACCESS_NOT_ENABLED) }
    }

    /// The event is complete when everything submitted to the context so far is, on every stream, destroyed ones too.
    fn cuCtxRecordEvent(context: usize, event: usize) {
        let mut st = state();
        let handle = if context == 0 { current()? } else { context };
        st.context(handle)?;
        capture::refuse_in_context(&st, handle)?;
        let cx = st.context(handle)?;
        let mut deps = cx.pending();
        // Work that would wait for the barrier comes after it, and so does the event.
        cx.barrier.retain(|dep| !dep.is_done());
        deps.extend(cx.barrier.iter().cloned());
        let event = st.event(event)?;
        if event.context != handle {
            return Err(INVALID_HANDLE);
        }
        // The time of a context's event is that of its recording: no single piece of work reaches it.
        event.record(deps, Arc::new(Stamp::at(engine::now().max(1))), None);
        Ok(())
    }

    /// All later work of the context waits for the event.
    fn cuCtxWaitEvent(context: usize, event: usize) {
        let mut st = state();
        let handle = if context == 0 { current()? } else { context };
        st.context(handle)?;
        capture::refuse_in_context(&st, handle)?;
        let deps = st.event(event)?.unfinished();
        let cx = st.context(handle)?;
        if !deps.is_empty() {
            cx.barrier.retain(|dep| !dep.is_done());
            cx.barrier.extend(deps);
            cx.barrier_number += 1;
        }
        Ok(())
    }
}

fn default_limit(limit: c_int) -> Option<usize> {
    match limit {
        0 => Some(1024),
        1 => Some(1 << 20),
        2 => Some(8 << 20),
        3 => Some(2),
        4 => Some(2048),
        5 => Some(128),
        6 => Some(0),
        _ => None,
    }
}

fn push(context: usize) -> Answer {
    state().context(context)?;
    with_stack(|stack| stack.push(context));
    Ok(())
}

fn pop(context: *mut usize) -> Answer {
    let top = with_stack(Vec::pop).ok_or(INVALID_CONTEXT)?;
    write_optional(context, top);
    Ok(())
}

fn create(context: *mut usize, flags: u32, device: c_int) -> Answer {
    check(device)?;
    if context.is_null() {
        return Err(INVALID_VALUE);
    }
    let mut st = state();
    let id = st.context_id();
    let handle = st.contexts.insert(Context::new(0, id, device, flags, false));
    // The streams carry the handle, which is known only now.
    *st.context(handle)? = Context::new(handle, id, device, flags, false);
    drop(st);
    with_stack(|stack| stack.push(handle));
    write(context, handle)
}

fn destroy(context: usize) -> Answer {
    let mut st = state();
    if st.context(context)?.primary {
        return Err(INVALID_CONTEXT);
    }
    drop(st);
    tear_down(context);
    with_stack(|stack| {
        if stack.last() == Some(&context) {
            stack.pop();
        }
    });
    Ok(())
}

fn retain_primary(st: &mut State, device: c_int) -> usize {
    let handle = st.device(device).primary.handle;
    st.device(device).primary.references += 1;
    if st.contexts.get(handle).is_some() {
        return handle;
    }
    let flags = st.device(device).primary.flags;
    let id = st.context_id();
    let handle = if handle == 0 { st.contexts.insert(Context::new(0, id, device, flags, true)) } else { handle };
    st.contexts.revive(handle, Context::new(handle, id, device, flags, true));
    st.device(device).primary.handle = handle;
    handle
}

fn release_primary(device: c_int) -> Answer {
    check(device)?;
    let mut st = state();
    let primary = &mut st.device(device).primary;
    if primary.references == 0 {
        return Err(INVALID_CONTEXT);
    }
    primary.references -= 1;
    let (last, handle) = (primary.references == 0, primary.handle);
    drop(st);
    if last {
        tear_down(handle);
    }
    Ok(())
}

/// The references stay counted, as on the real driver; the next retain makes the context anew.
fn reset_primary(device: c_int) -> Answer {
    check(device)?;
    let mut st = state();
    let handle = st.device(device).primary.handle;
    drop(st);
    if handle != 0 {
        tear_down(handle);
    }
    Ok(())
}

fn set_primary_flags(device: c_int, flags: u32) -> Answer {
    check(device)?;
    let mut st = state();
    st.device(device).primary.flags = flags;
    let handle = st.device(device).primary.handle;
    if let Some(cx) = st.contexts.get_mut(handle) {
        cx.flags = flags;
    }
    Ok(())
}

fn synchronize(context: usize) -> Answer {
    let mut st = state();
    st.context(context)?;
    capture::refuse_in_context(&st, context)?;
    let deps = st.context(context)?.pending();
    drop(st);
    engine::wait_all(&deps);
    Ok(())
}

/// Ends a context: no new work, then the end of the old, then its plain memory, streams and events go.
///
/// VMM handles, mappings and reservations belong to the process and its devices, not to a context: they stay.
fn tear_down(handle: usize) {
    let mut st = state();
    let Some(cx) = st.contexts.remove(handle) else {
        return;
    };
    capture::abandon_context(&mut st, handle);
    drop(st);
    engine::wait_all(&cx.pending());
    let mut st = state();
    st.streams.retain(|stream| stream.context != handle);
    st.events.retain(|event| event.context != handle);
    memory::release_context(&mut st, handle);
}
