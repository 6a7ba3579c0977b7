//! Tests of the whole driver, through its exported functions. They share its devices, hence run one at a time.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::{Mutex, MutexGuard};

use crate::capture::*;
use crate::codes::*;
use crate::context::*;
use crate::control::*;
use crate::copy::*;
use crate::device::*;
use crate::event::*;
use crate::graph::*;
use crate::ipc::*;
use crate::memory::*;
use crate::pointer::*;
use crate::pools::*;
use crate::stream::*;
use crate::vmm::*;

const NON_BLOCKING_FLAG: u32 = 1;
const DISABLE_TIMING: u32 = 2;
const BLOCK: usize = 1 << 20;
const PAGE_BYTES: usize = GRANULARITY as usize;

/// Calls a driver function; its result code.
macro_rules! cu {
    ($name:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: the tests pass pointers to their own locals and sizes that fit them.
        unsafe { $name($($arg),*) }
    };
}

/// Calls a driver function that must succeed.
macro_rules! ok {
    ($name:ident($($arg:expr),* $(,)?)) => {
        assert_eq!(cu!($name($($arg),*)), 0, stringify!($name))
    };
}

mod processes;

/// Device 0's primary context, current, with nobody else using the driver.
struct Session {
    context: usize,
    _alone: MutexGuard<'static, ()>,
}

fn session() -> Session {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock();
    ok!(cuInit(0));
    let mut context = 0;
    ok!(cuDevicePrimaryCtxRetain(&mut context, 0));
    ok!(cuCtxSetCurrent(context));
    Session { context, _alone: alone }
}

/// Holds a stream up until it is opened, or dropped.
struct Gate(Box<AtomicU32>);

impl Gate {
    fn on(stream: usize) -> Gate {
        let gate = Gate(Box::new(AtomicU32::new(0)));
        ok!(cuStreamWaitValue32_v2(stream, gate.0.as_ptr() as u64, 1, 1));
        gate
    }

    fn open(&self) {
        self.0.store(1, Ordering::Release);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
        cu!(cuCtxSynchronize());
        // Work of a context that a test has torn down may be about to read the word.
        std::mem::forget(std::mem::replace(&mut self.0, Box::new(AtomicU32::new(1))));
    }
}

fn stream(flags: u32) -> usize {
    let mut stream = 0;
    ok!(cuStreamCreate(&mut stream, flags));
    stream
}

fn event() -> usize {
    let mut event = 0;
    ok!(cuEventCreate(&mut event, DISABLE_TIMING));
    event
}

fn memory(bytes: usize) -> u64 {
    let mut ptr = 0;
    ok!(cuMemAlloc_v2(&mut ptr, bytes));
    ptr
}

fn free_bytes() -> usize {
    let (mut free, mut total) = (0, 0);
    ok!(cuMemGetInfo_v2(&mut free, &mut total));
    free
}

fn byte(ptr: u64) -> u8 {
    // SAFETY: device memory is the host's, and the tests ask for what is mapped.
    unsafe { (ptr as *const u8).read_volatile() }
}

#[test]
fn work_is_late_until_its_stream_gets_there() {
    let _session = session();
    let s = stream(NON_BLOCKING_FLAG);
    let p = memory(BLOCK);
    let gate = Gate::on(s);
    ok!(cuMemsetD8Async(p, 7, BLOCK, s));
    assert_eq!(cu!(cuStreamQuery(s)), NOT_READY.0);
    assert_eq!(byte(p + 5), 0);
    gate.open();
    ok!(cuStreamSynchronize(s));
    assert_eq!(byte(p + 5), 7);
    assert_eq!(byte(p + BLOCK as u64 - 1), 7);
    ok!(cuMemFree_v2(p));
    ok!(cuStreamDestroy_v2(s));
}

#[test]
fn the_legacy_stream_orders_blocking_streams_only() {
    let _session = session();
    let (blocking, free) = (stream(0), stream(NON_BLOCKING_FLAG));
    let (on_legacy, on_blocking) = (event(), event());

    let gate = Gate::on(free);
    ok!(cuEventRecord(on_legacy, 0));
    ok!(cuEventQuery(on_legacy));
    drop(gate);

    let gate = Gate::on(blocking);
    ok!(cuEventRecord(on_legacy, 1));
    assert_eq!(cu!(cuEventQuery(on_legacy)), NOT_READY.0);
    assert_eq!(cu!(cuStreamQuery(0)), NOT_READY.0);
    ok!(cuStreamQuery(free));
    drop(gate);

    let gate = Gate::on(0);
    ok!(cuEventRecord(on_blocking, blocking));
    assert_eq!(cu!(cuEventQuery(on_blocking)), NOT_READY.0);
    ok!(cuEventRecord(on_legacy, free));
    ok!(cuEventQuery(on_legacy));
    drop(gate);

    for s in [blocking, free] {
        ok!(cuStreamDestroy_v2(s));
    }
    for e in [on_legacy, on_blocking] {
        ok!(cuEventDestroy_v2(e));
    }
}

#[test]
fn an_event_covers_what_came_before_its_record() {
    let _session = session();
    let (s, t) = (stream(NON_BLOCKING_FLAG), stream(NON_BLOCKING_FLAG));
    let e = event();
    ok!(cuEventQuery(e));
    ok!(cuEventSynchronize(e));
    ok!(cuEventRecord(e, s));
    let gate = Gate::on(s);
    ok!(cuEventQuery(e));
    ok!(cuEventRecord(e, s));
    assert_eq!(cu!(cuEventQuery(e)), NOT_READY.0);

    let p = memory(BLOCK);
    ok!(cuStreamWaitEvent(t, e, 0));
    ok!(cuMemsetD32Async(p, 0x01020304, BLOCK / 4, t));
    assert_eq!(cu!(cuStreamQuery(t)), NOT_READY.0);
    gate.open();
    ok!(cuEventSynchronize(e));
    ok!(cuStreamSynchronize(t));
    assert_eq!((byte(p), byte(p + 3)), (4, 1));
    ok!(cuMemFree_v2(p));
    ok!(cuEventDestroy_v2(e));
    assert_eq!(cu!(cuEventQuery(e)), INVALID_HANDLE.0);
    ok!(cuStreamDestroy_v2(s));
    ok!(cuStreamDestroy_v2(t));
}

#[test]
fn timed_events_measure() {
    let _session = session();
    let (mut a, mut b, mut ms) = (0, 0, 0.0);
    ok!(cuEventCreate(&mut a, 0));
    ok!(cuEventCreate(&mut b, 0));
    assert_eq!(cu!(cuEventElapsedTime(&mut ms, a, b)), INVALID_HANDLE.0);
    let s = stream(NON_BLOCKING_FLAG);
    ok!(cuEventRecord(a, s));
    let gate = Gate::on(s);
    ok!(cuEventRecord(b, s));
    assert_eq!(cu!(cuEventElapsedTime_v2(&mut ms, a, b)), NOT_READY.0);
    std::thread::sleep(std::time::Duration::from_millis(2));
    gate.open();
    ok!(cuStreamSynchronize(s));
    ok!(cuEventElapsedTime_v2(&mut ms, a, b));
    assert!(ms >= 2.0, "{ms} ms");
    for e in [a, b] {
        ok!(cuEventDestroy_v2(e));
    }
    ok!(cuStreamDestroy_v2(s));
}

#[test]
fn a_context_event_covers_every_stream() {
    let session = session();
    let e = event();
    ok!(cuCtxRecordEvent(session.context, e));
    ok!(cuEventQuery(e));
    for kind in ["non-blocking", "blocking", "legacy", "per-thread", "destroyed"] {
        let gate = match kind {
            "non-blocking" => Gate::on(stream(NON_BLOCKING_FLAG)),
            "blocking" => Gate::on(stream(0)),
            "legacy" => Gate::on(1),
            "per-thread" => {
                let context = session.context;
                let other = std::thread::spawn(move || {
                    ok!(cuCtxSetCurrent(context));
                    Gate::on(2)
                });
                other.join().unwrap()
            }
            _ => {
                let s = stream(NON_BLOCKING_FLAG);
                let gate = Gate::on(s);
                ok!(cuStreamDestroy_v2(s));
                gate
            }
        };
        ok!(cuCtxRecordEvent(session.context, e));
        assert_eq!(cu!(cuEventQuery(e)), NOT_READY.0, "{kind}");
        gate.open();
        ok!(cuEventSynchronize(e));
        ok!(cuEventQuery(e));
    }
    ok!(cuEventDestroy_v2(e));
}

#[test]
fn a_context_wait_holds_later_work_and_not_the_host() {
    let session = session();
    let (s, t) = (stream(NON_BLOCKING_FLAG), stream(NON_BLOCKING_FLAG));
    let e = event();
    let p = memory(BLOCK);
    let gate = Gate::on(s);
    ok!(cuCtxRecordEvent(session.context, e));
    ok!(cuStreamQuery(t));
    ok!(cuCtxWaitEvent(session.context, e));
    ok!(cuStreamQuery(t));
    ok!(cuMemsetD8Async(p, 9, BLOCK, t));
    let new = stream(0);
    ok!(cuEventRecord(e, new));
    assert_eq!(cu!(cuStreamQuery(t)), NOT_READY.0);
    assert_eq!(cu!(cuEventQuery(e)), NOT_READY.0);
    gate.open();
    ok!(cuCtxSynchronize());
    assert_eq!(byte(p), 9);
    ok!(cuMemFree_v2(p));
    ok!(cuEventDestroy_v2(e));
    for s in [s, t, new] {
        ok!(cuStreamDestroy_v2(s));
    }
}

/// Record, spin on a flag, wait, set the flag: what spins was given after the record, so the wait does not cover it.
#[test]
fn a_context_wait_does_not_cover_later_work() {
    let session = session();
    let (s, t) = (stream(NON_BLOCKING_FLAG), stream(NON_BLOCKING_FLAG));
    let e = event();
    let flag = memory(4096);
    ok!(cuCtxRecordEvent(session.context, e));
    ok!(cuStreamWaitValue32_v2(s, flag, 1, 1));
    ok!(cuCtxWaitEvent(session.context, e));
    ok!(cuStreamWriteValue32_v2(t, flag, 1, 0));
    ok!(cuCtxSynchronize());
    ok!(cuMemFree_v2(flag));
    ok!(cuEventDestroy_v2(e));
    ok!(cuStreamDestroy_v2(s));
    ok!(cuStreamDestroy_v2(t));
}

#[test]
fn a_destroyed_stream_leaves_its_handle_and_not_its_id() {
    let _session = session();
    let id = |s: usize| {
        let mut id = 0;
        ok!(cuStreamGetId(s, &mut id));
        id
    };
    let s = stream(NON_BLOCKING_FLAG);
    let before = id(s);
    let gate = Gate::on(s);
    ok!(cuStreamDestroy_v2(s));
    let again = stream(NON_BLOCKING_FLAG);
    assert_eq!(s, again);
    assert_ne!(before, id(again));
    ok!(cuStreamQuery(again));
    gate.open();
    ok!(cuStreamDestroy_v2(again));
    assert_eq!(cu!(cuStreamQuery(again)), INVALID_HANDLE.0);

    assert_eq!(id(0), id(1));
    let mine = id(2);
    assert_ne!(mine, id(1));
    let mut by_variant = 0;
    ok!(cuStreamGetId_ptsz(0, &mut by_variant));
    assert_eq!(mine, by_variant);
}

#[test]
fn plain_memory_answers_as_the_driver_does() {
    let _session = session();
    let before = free_bytes();
    let mut p = 1;
    assert_eq!(cu!(cuMemAlloc_v2(&mut p, 0)), 1);
    assert_eq!(p, 0);
    assert_eq!(cu!(cuMemAlloc_v2(null_mut(), 4)), 1);
    assert_eq!(cu!(cuMemAlloc_v2(&mut p, 4 << 40)), 2);
    assert_eq!(cu!(cuMemAlloc_v2(&mut p, usize::MAX)), 2);
    assert_eq!(cu!(cuMemAlloc_v2(&mut p, before + 1)), 2);

    let (p, q) = (memory(4096), memory(4096));
    let (mut base, mut size) = (0, 0);
    ok!(cuMemGetAddressRange_v2(&mut base, &mut size, p + 100));
    assert_eq!((base, size), (p, 4096));
    let id = |p: u64| {
        let mut id = 0u64;
        ok!(cuPointerGetAttribute((&raw mut id).cast(), 7, p));
        id
    };
    assert_ne!(id(p), id(q));
    assert_eq!(free_bytes(), before - 8192);
    assert_eq!(cu!(cuMemFree_v2(p + 512)), 1);
    assert_eq!(cu!(cuMemsetD8_v2(p, 0, 4097)), 1);
    ok!(cuMemFree_v2(p));
    assert_eq!(cu!(cuMemFree_v2(p)), 1);
    ok!(cuMemFree_v2(q));
    ok!(cuMemFree_v2(0));
    ok!(cuMemGetInfo_v2(null_mut(), null_mut()));
    assert_eq!(free_bytes(), before);
}

#[test]
fn a_free_waits_for_the_device() {
    let session = session();
    let s = stream(NON_BLOCKING_FLAG);
    let p = memory(4096);
    let gate = Gate::on(s);
    let context = session.context;
    let freeing = std::thread::spawn(move || {
        ok!(cuCtxSetCurrent(context));
        ok!(cuMemFree_v2(p));
    });
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(!freeing.is_finished());
    gate.open();
    freeing.join().unwrap();
    ok!(cuStreamDestroy_v2(s));
}

#[test]
fn stream_ordered_memory_goes_back_in_stream_order() {
    let _session = session();
    let before = free_bytes();
    let s = stream(NON_BLOCKING_FLAG);
    let (mut p, mut q) = (0, 0);
    ok!(cuMemAllocAsync(&mut p, BLOCK, s));
    let gate = Gate::on(s);
    ok!(cuMemsetD8Async(p, 1, BLOCK, s));
    ok!(cuMemFreeAsync(p, s));
    assert_eq!(cu!(cuMemFreeAsync(p, s)), 1);
    assert_eq!(free_bytes(), before - BLOCK);
    gate.open();
    ok!(cuStreamSynchronize(s));
    assert_eq!(free_bytes(), before);
    // Frees cross over.
    ok!(cuMemAllocAsync(&mut p, BLOCK, s));
    ok!(cuMemFree_v2(p));
    ok!(cuMemAlloc_v2(&mut q, BLOCK));
    ok!(cuMemFreeAsync(q, s));
    ok!(cuStreamSynchronize(s));
    assert_eq!(free_bytes(), before);
    ok!(cuStreamDestroy_v2(s));
}

fn prop() -> AllocationProp {
    AllocationProp {
        kind: 1,
        handle_types: 1,
        location: MemLocation::device(0),
        win32: null_mut(),
        compression: 0,
        rdma_capable: 1,
        usage: 0,
        reserved: [0; 4],
    }
}

fn page(bytes: usize) -> u64 {
    let mut handle = 0;
    ok!(cuMemCreate(&mut handle, bytes, &prop(), 0));
    handle
}

fn open_access(ptr: u64, bytes: usize) -> u32 {
    let access = AccessDesc { location: MemLocation::device(0), flags: 3 };
    cu!(cuMemSetAccess(ptr, bytes, &access, 1))
}

/// Whether the host could read a byte: asked of the kernel, which does not fault.
fn readable(ptr: u64) -> bool {
    // SAFETY: write checks its buffer itself, and answers EFAULT.
    unsafe {
        let mut ends = [0; 2];
        assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
        let written = libc::write(ends[1], ptr as *const c_void, 1);
        libc::close(ends[0]);
        libc::close(ends[1]);
        written == 1
    }
}

#[test]
fn pages_are_mapped_moved_and_given_back() {
    let _session = session();
    let before = free_bytes();
    let mut va = 0;
    ok!(cuMemAddressReserve(&mut va, 1 << 40, 0, 0, 0));
    assert!(va.is_multiple_of(GRANULARITY));
    let page = page(2 * PAGE_BYTES);
    assert_eq!(free_bytes(), before - 2 * PAGE_BYTES);
    assert_eq!(cu!(cuMemMap(va, 2 * PAGE_BYTES, PAGE_BYTES, page, 0)), NOT_SUPPORTED.0);
    ok!(cuMemMap(va, 2 * PAGE_BYTES, 0, page, 0));
    assert_eq!(cu!(cuMemMap(va, 2 * PAGE_BYTES, 0, page, 0)), 1);
    assert!(!readable(va));
    assert_eq!(open_access(va, PAGE_BYTES), 1);
    assert_eq!(open_access(va, 2 * PAGE_BYTES), 0);
    assert!(readable(va));

    // One handle at two addresses is one memory.
    let second = va + 64 * GRANULARITY;
    ok!(cuMemMap(second, 2 * PAGE_BYTES, 0, page, 0));
    assert_eq!(open_access(second, 2 * PAGE_BYTES), 0);
    ok!(cuMemsetD8_v2(va + 5, 42, 1));
    ok!(cuCtxSynchronize());
    assert_eq!(byte(second + 5), 42);

    assert_eq!(cu!(cuMemUnmap(va, PAGE_BYTES)), 1);
    assert_eq!(cu!(cuMemAddressFree(va, 1 << 40)), 1);
    ok!(cuMemRelease(page));
    assert_eq!(cu!(cuMemRelease(page)), 1);
    assert_eq!(free_bytes(), before - 2 * PAGE_BYTES);
    ok!(cuMemUnmap(va, 2 * PAGE_BYTES));
    assert!(!readable(va));
    let (mut base, mut size) = (0, 0);
    ok!(cuMemGetAddressRange_v2(&mut base, &mut size, second + GRANULARITY + 1));
    assert_eq!((base, size), (second, 2 * PAGE_BYTES));
    ok!(cuMemUnmap(second, 2 * PAGE_BYTES));
    assert_eq!(free_bytes(), before);
    ok!(cuMemAddressFree(va, 1 << 40));

    let mut handle = 0;
    let too_much = before.next_multiple_of(PAGE_BYTES) + PAGE_BYTES;
    assert_eq!(cu!(cuMemCreate(&mut handle, too_much, &prop(), 0)), 2);
}

#[test]
fn several_pages_take_access_and_unmap_together() {
    let _session = session();
    let mut va = 0;
    ok!(cuMemAddressReserve(&mut va, 4 * PAGE_BYTES, 0, 0, 0));
    for i in 0..4 {
        let page = page(PAGE_BYTES);
        ok!(cuMemMap(va + i * GRANULARITY, PAGE_BYTES, 0, page, 0));
        ok!(cuMemRelease(page));
    }
    assert_eq!(open_access(va, 4 * PAGE_BYTES), 0);
    ok!(cuMemsetD8_v2(va, 3, 4 * PAGE_BYTES));
    ok!(cuCtxSynchronize());
    assert_eq!(byte(va + 4 * GRANULARITY - 1), 3);
    ok!(cuMemUnmap(va, 4 * PAGE_BYTES));
    ok!(cuMemAddressFree(va, 4 * PAGE_BYTES));
}

#[test]
fn a_page_travels_by_descriptor() {
    let _session = session();
    let first = page(PAGE_BYTES);
    let page = page(PAGE_BYTES);
    let mut fd: c_int = -1;
    ok!(cuMemExportToShareableHandle((&raw mut fd).cast(), page, 1, 0));
    let mut imported = 0;
    ok!(cuMemImportFromShareableHandle(&mut imported, fd as usize as *mut c_void, 1));
    assert_eq!(imported, page);
    ok!(cuMemRelease(imported));
    ok!(cuMemRelease(page));
    ok!(cuMemRelease(first));
    // The descriptor keeps the memory: it can be imported still.
    ok!(cuMemImportFromShareableHandle(&mut imported, fd as usize as *mut c_void, 1));
    ok!(cuMemRelease(imported));
    // SAFETY: the descriptor is the test's own.
    unsafe { libc::close(fd) };
    assert_ne!(cu!(cuMemImportFromShareableHandle(&mut imported, fd as usize as *mut c_void, 1)), 0);
}

#[test]
fn capture_refuses_what_the_driver_refuses() {
    let session = session();
    let s = stream(NON_BLOCKING_FLAG);
    let (p, e) = (memory(4096), event());
    let mut graph = 0;
    let mut q = 0;
    for (mode, plain) in [(0, 900), (1, 900), (2, 0)] {
        ok!(cuStreamBeginCapture_v2(s, mode));
        ok!(cuMemGetInfo_v2(null_mut(), null_mut()));
        assert_eq!(cu!(cuMemAlloc_v2(&mut q, 4096)), plain);
        if plain == 0 {
            ok!(cuMemFree_v2(q));
        }
        let end = if plain == 0 { 0 } else { 901 };
        assert_eq!(cu!(cuStreamEndCapture(s, &mut graph)), end);
        if end == 0 {
            ok!(cuGraphDestroy(graph));
        }

        type Call = fn(usize, usize) -> u32;
        let calls: [Call; 3] = [
            |_, _| cu!(cuCtxSynchronize()),
            |context, e| cu!(cuCtxRecordEvent(context, e)),
            |context, e| cu!(cuCtxWaitEvent(context, e)),
        ];
        for call in calls {
            ok!(cuStreamBeginCapture_v2(s, mode));
            assert_eq!(call(session.context, e), 900);
            assert_eq!(cu!(cuStreamEndCapture(s, &mut graph)), 901);
            assert_eq!(graph, 0);
        }
    }
    // Another thread's thread-local capture is none of this one's business.
    ok!(cuStreamBeginCapture_v2(s, 1));
    let context = session.context;
    std::thread::spawn(move || {
        ok!(cuCtxSetCurrent(context));
        let p = memory(4096);
        ok!(cuMemFree_v2(p));
    })
    .join()
    .unwrap();
    ok!(cuStreamEndCapture(s, &mut graph));
    ok!(cuGraphDestroy(graph));
    ok!(cuMemFree_v2(p));
    ok!(cuEventDestroy_v2(e));
    ok!(cuStreamDestroy_v2(s));
}

#[test]
fn captured_work_runs_when_its_graph_does() {
    let _session = session();
    let (s, t) = (stream(NON_BLOCKING_FLAG), stream(NON_BLOCKING_FLAG));
    let e = event();
    let p = memory(4096);
    let (mut graph, mut exec, mut status) = (0, 0, 0);
    ok!(cuStreamBeginCapture_v2(s, 0));
    ok!(cuMemsetD8Async(p, 5, 4096, s));
    ok!(cuEventRecord(e, s));
    ok!(cuStreamWaitEvent(t, e, 0));
    ok!(cuStreamIsCapturing(t, &mut status));
    assert_eq!(status, 1);
    ok!(cuMemsetD8Async(p, 6, 1, t));
    ok!(cuEventRecord(e, t));
    ok!(cuStreamWaitEvent(s, e, 0));
    ok!(cuStreamEndCapture(s, &mut graph));
    ok!(cuStreamIsCapturing(t, &mut status));
    assert_eq!(status, 0);
    assert_eq!(byte(p), 0);
    ok!(cuGraphInstantiateWithFlags(&mut exec, graph, 0));
    ok!(cuGraphLaunch(exec, s));
    ok!(cuStreamSynchronize(s));
    assert_eq!((byte(p), byte(p + 1)), (6, 5));
    ok!(cuGraphExecDestroy(exec));
    ok!(cuGraphDestroy(graph));
    ok!(cuMemFree_v2(p));
    ok!(cuEventDestroy_v2(e));
    ok!(cuStreamDestroy_v2(s));
    ok!(cuStreamDestroy_v2(t));
}

#[test]
fn a_blocking_capture_bars_the_legacy_stream() {
    let _session = session();
    let s = stream(0);
    let p = memory(4096);
    let (mut graph, mut status) = (0, 0);
    ok!(cuStreamBeginCapture_v2(s, 2));
    assert_eq!(cu!(cuStreamIsCapturing(0, &mut status)), 906);
    assert_eq!(cu!(cuMemsetD8Async(p, 5, 4096, 0)), 906);
    assert_eq!(cu!(cuStreamEndCapture(s, &mut graph)), 901);
    ok!(cuMemFree_v2(p));
    ok!(cuStreamDestroy_v2(s));
}

#[test]
fn a_reset_takes_plain_memory_and_ends_the_context() {
    let session = session();
    let mut context = 0;
    ok!(cuDevicePrimaryCtxRetain(&mut context, 1));
    ok!(cuCtxSetCurrent(context));
    let before = free_bytes();
    let p = memory(BLOCK);
    let (mut first, mut second, mut q) = (0, 0, 0);
    ok!(cuCtxGetId(context, &mut first));
    let s = stream(0);
    ok!(cuDevicePrimaryCtxReset_v2(1));
    assert_eq!(cu!(cuMemFree_v2(p)), 709);
    assert_eq!(cu!(cuMemAlloc_v2(&mut q, 4096)), 709);
    assert_ne!(cu!(cuStreamQuery(s)), 0);
    let mut again = 0;
    ok!(cuDevicePrimaryCtxRetain(&mut again, 1));
    assert_eq!(context, again);
    ok!(cuCtxGetId(context, &mut second));
    assert_ne!(first, second);
    assert_eq!(free_bytes(), before);
    assert_eq!(cu!(cuMemFree_v2(p)), 1);
    ok!(cuDevicePrimaryCtxRelease_v2(1));
    ok!(cuDevicePrimaryCtxRelease_v2(1));
    assert_eq!(cu!(cuDevicePrimaryCtxRelease_v2(1)), 201);
    ok!(cuCtxSetCurrent(session.context));
}

#[test]
fn created_contexts_stack() {
    let session = session();
    let (mut context, mut top, mut current) = (0, 0, 0);
    ok!(cuCtxCreate_v2(&mut context, 0, 1));
    ok!(cuCtxGetCurrent(&mut current));
    assert_eq!(context, current);
    ok!(cuCtxPopCurrent_v2(&mut top));
    assert_eq!(context, top);
    ok!(cuCtxGetCurrent(&mut current));
    assert_eq!(session.context, current);
    ok!(cuCtxPushCurrent_v2(context));
    ok!(cuCtxDestroy_v2(context));
    ok!(cuCtxGetCurrent(&mut current));
    assert_eq!(session.context, current);
    assert_eq!(cu!(cuCtxSetCurrent(context)), 709);
}

#[test]
fn faults_come_when_asked() {
    let _session = session();
    let mut handle = 0;
    // SAFETY: a C string.
    assert_eq!(unsafe { simcudaSetFail(c"cuMemCreate:2,cuMemAlloc:every:2:700".as_ptr()) }, 0);
    ok!(cuMemRelease(page(PAGE_BYTES)));
    assert_eq!(cu!(cuMemCreate(&mut handle, PAGE_BYTES, &prop(), 0)), 2);
    ok!(cuMemRelease(page(PAGE_BYTES)));
    let p = memory(4096);
    assert_eq!(cu!(cuMemAlloc_v2(&mut handle, 4096)), 700);
    simcudaReset();
    ok!(cuMemFree_v2(p));
    // SAFETY: a C string.
    assert_eq!(unsafe { simcudaCallCount(c"cuMemFree".as_ptr()) }, 1);
    // SAFETY: a C string.
    assert_eq!(unsafe { simcudaSetFail(c"nonsense".as_ptr()) }, 1);
}

/// Threads that share streams, events and fences, with late work: each reads back only what it wrote, and nothing hangs.
#[test]
fn threads_share_streams() {
    let session = session();
    let before = free_bytes();
    let context = session.context;
    let streams: Vec<usize> = (0..5).map(|i| stream(i & 1)).collect();
    simcudaSetDelay(30);
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let streams = &streams;
            scope.spawn(move || {
                ok!(cuCtxSetCurrent(context));
                let (mine, fence) = (event(), event());
                for round in 0..150usize {
                    let from = streams[(round + thread as usize) % 5];
                    let to = [streams[(round * 3 + 1) % 5], 1, 2][round % 3];
                    let value = (round as u8) ^ (thread << 6);
                    let mut p = 0;
                    if round % 2 == 0 {
                        p = memory(8192);
                    } else {
                        ok!(cuMemAllocAsync(&mut p, 8192, from));
                    }
                    ok!(cuMemsetD8Async(p, value, 4096, from));
                    match round % 4 {
                        0 => {
                            ok!(cuCtxRecordEvent(context, fence));
                            ok!(cuCtxWaitEvent(context, fence));
                        }
                        1 => ok!(cuStreamSynchronize(from)),
                        _ => {
                            ok!(cuEventRecord(mine, from));
                            ok!(cuStreamWaitEvent(to, mine, 0));
                        }
                    }
                    ok!(cuMemcpyDtoDAsync_v2(p + 4096, p, 4096, to));
                    let mut copy = [0u8; 4096];
                    ok!(cuMemcpyDtoHAsync_v2(copy.as_mut_ptr() as u64, p + 4096, 4096, to));
                    assert!(copy.iter().all(|&byte| byte == value), "round {round}");
                    if round % 3 == 0 {
                        ok!(cuMemFree_v2(p));
                    } else {
                        ok!(cuMemFreeAsync(p, to));
                    }
                }
                ok!(cuEventDestroy_v2(mine));
                ok!(cuEventDestroy_v2(fence));
            });
        }
    });
    simcudaReset();
    ok!(cuCtxSynchronize());
    assert_eq!(free_bytes(), before);
    for s in streams {
        ok!(cuStreamDestroy_v2(s));
    }
}
