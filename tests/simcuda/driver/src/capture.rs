//! Stream capture: its state, and what it forbids.
//!
//! A capture takes work in the order in which it was submitted, from all streams that take part: that order respects every
//! dependency between them, so a graph is a list. Not modelled: that all forked streams must have been joined at the end.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::call::driver_fns;
use crate::codes::*;
use crate::context::thread;
use crate::engine::{Kind, Op, Stream};
use crate::graph::Graph;
use crate::memory::Freed;
use crate::state::{State, state};

#[derive(Copy, Clone, PartialEq, Eq)]
pub enum Mode {
    Global,
    ThreadLocal,
    Relaxed,
}

pub struct Capture {
    pub id: u64,
    context: usize,
    mode: Mode,
    thread: u64,
    origin: u64,
    invalid: AtomicBool,
    graph: Mutex<Graph>,
    members: Mutex<Vec<Arc<Stream>>>,
}

impl Capture {
    fn invalidate(&self) {
        self.invalid.store(true, Ordering::Relaxed);
    }

    fn is_invalid(&self) -> bool {
        self.invalid.load(Ordering::Relaxed)
    }

    fn admit(self: &Arc<Capture>, stream: &Arc<Stream>) {
        *stream.capture.lock() = Some(self.clone());
        self.members.lock().push(stream.clone());
    }
}

thread_local! {
    static THREAD_MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

fn mode_of(number: c_int) -> CuResult<Mode> {
    match number {
        0 => Ok(Mode::Global),
        1 => Ok(Mode::ThreadLocal),
        2 => Ok(Mode::Relaxed),
        _ => Err(INVALID_VALUE),
    }
}

fn of(stream: &Stream) -> Option<Arc<Capture>> {
    stream.capture.lock().clone()
}

/// Invalidates what is given; 900 when there was any.
fn refuse<'a>(captures: impl Iterator<Item = &'a Arc<Capture>>) -> Answer {
    let mut any = false;
    for capture in captures {
        capture.invalidate();
        any = true;
    }
    if any { Err(STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

/// For calls that may wait or touch the legacy stream inside ("potentially unsafe"): refused by this thread's own captures
/// and any thread's global ones, unless this thread's mode or the capture's own is relaxed.
pub fn refuse_unsafe(st: &State) -> Answer {
    let mode = THREAD_MODE.get();
    refuse(st.captures.iter().filter(|capture| match mode {
        Mode::Relaxed => false,
        Mode::ThreadLocal => capture.thread == thread() && capture.mode != Mode::Relaxed,
        Mode::Global => capture.mode == Mode::Global || (capture.thread == thread() && capture.mode != Mode::Relaxed),
    }))
}

/// For calls that concern all streams of a context: refused in every mode.
pub fn refuse_in_context(st: &State, context: usize) -> Answer {
    refuse(st.captures.iter().filter(|capture| capture.context == context))
}

/// For calls that wait for a stream.
pub fn refuse_on_stream(st: &State, stream: &Arc<Stream>) -> Answer {
    refuse_implicit(st, stream, true)?;
    refuse(of(stream).iter())
}

/// Work on the legacy stream would make it wait for a blocking stream that is being captured: 906.
fn refuse_implicit(st: &State, stream: &Stream, invalidate: bool) -> Answer {
    if stream.kind != Kind::Legacy {
        return Ok(());
    }
    let mut found = false;
    for capture in st.captures.iter().filter(|capture| capture.context == stream.context) {
        if capture.members.lock().iter().any(|member| member.is_blocking()) {
            found = true;
            if invalidate {
                capture.invalidate();
            }
        }
    }
    if found { Err(STREAM_CAPTURE_IMPLICIT) } else { Ok(()) }
}

/// An event last recorded in a capture has no state to ask for: 907.
pub fn refuse_captured(st: &mut State, event: usize) -> Answer {
    let Some(id) = st.event(event)?.capture else {
        return Ok(());
    };
    match st.captures.iter().find(|capture| capture.id == id) {
        Some(capture) => {
            capture.invalidate();
            Err(CAPTURED_EVENT)
        }
        None => Err(CAPTURED_EVENT),
    }
}

/// Takes work into the capture that the stream takes part in. False when there is none, and the work is to run.
pub fn take(st: &State, stream: &Arc<Stream>, op: &Op) -> CuResult<bool> {
    refuse_implicit(st, stream, true)?;
    let Some(capture) = of(stream) else {
        return Ok(false);
    };
    if capture.is_invalid() {
        return Err(STREAM_CAPTURE_INVALIDATED);
    }
    if !matches!(op, Op::Marker(_)) {
        capture.graph.lock().nodes.push(op.clone());
    }
    Ok(true)
}

/// A free on a capturing stream: the memory goes over to the graph. Gives it back when there is no capture.
pub fn take_free(st: &State, stream: &Arc<Stream>, freed: Arc<Freed>) -> CuResult<Option<Arc<Freed>>> {
    refuse_implicit(st, stream, true)?;
    match of(stream) {
        None => Ok(Some(freed)),
        Some(capture) => {
            capture.graph.lock().owned.push(freed);
            Ok(None)
        }
    }
}

/// `cuStreamWaitEvent`: an event of a capture draws the stream into it. False when it is an ordinary wait.
pub fn join(st: &mut State, stream: &Arc<Stream>, event: usize) -> CuResult<bool> {
    let recorded = st.event(event)?.capture;
    let mine = of(stream);
    let Some(id) = recorded else {
        return match mine {
            None => refuse_implicit(st, stream, true).map(|()| false),
            // Waiting inside a capture for work outside of it.
            Some(capture) => {
                capture.invalidate();
                Err(STREAM_CAPTURE_ISOLATION)
            }
        };
    };
    let theirs = st.captures.iter().find(|capture| capture.id == id).cloned().ok_or(CAPTURED_EVENT)?;
    match mine {
        Some(capture) if capture.id == id => Ok(true),
        Some(capture) => {
            capture.invalidate();
            theirs.invalidate();
            Err(STREAM_CAPTURE_MERGE)
        }
        None if stream.kind == Kind::Legacy => {
            theirs.invalidate();
            Err(STREAM_CAPTURE_IMPLICIT)
        }
        None => {
            theirs.admit(stream);
            Ok(true)
        }
    }
}

/// A stream is destroyed: its capture cannot be ended any more.
pub fn drop_stream(st: &mut State, stream: &Arc<Stream>) {
    if let Some(capture) = of(stream) {
        capture.invalidate();
        if capture.origin == stream.id {
            end(st, &capture);
        }
    }
}

/// A context is destroyed, and its captures with it.
pub fn abandon_context(st: &mut State, context: usize) {
    for capture in st.captures.clone() {
        if capture.context == context {
            end(st, &capture);
        }
    }
}

fn end(st: &mut State, capture: &Arc<Capture>) {
    st.captures.retain(|c| c.id != capture.id);
    for member in capture.members.lock().drain(..) {
        *member.capture.lock() = None;
    }
}

driver_fns! {
    fn cuStreamBeginCapture_v2 | cuStreamBeginCapture_v2_ptsz(stream: usize, mode: c_int), null => {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let mode = mode_of(mode)?;
        let mut st = state();
        let stream = st.stream(stream, null)?;
        if stream.kind == Kind::Legacy {
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        if of(&stream).is_some() {
            return Err(ILLEGAL_STATE);
        }
        let capture = Arc::new(Capture {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            context: stream.context,
            mode,
            thread: thread(),
            origin: stream.id,
            invalid: AtomicBool::new(false),
            graph: Mutex::default(),
            members: Mutex::default(),
        });
        capture.admit(&stream);
        st.captures.push(capture);
        Ok(())
    }

    fn cuStreamEndCapture | cuStreamEndCapture_ptsz(stream: usize, graph: *mut usize), null => {
        write(graph, 0)?;
        let mut st = state();
        let stream = st.stream(stream, null)?;
        let capture = of(&stream).ok_or(ILLEGAL_STATE)?;
        if capture.origin != stream.id {
            capture.invalidate();
            return Err(STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode != Mode::Relaxed && capture.thread != thread() {
            return Err(STREAM_CAPTURE_WRONG_THREAD);
        }
        end(&mut st, &capture);
        if capture.is_invalid() {
            return Err(STREAM_CAPTURE_INVALIDATED);
        }
        let captured = std::mem::take(&mut *capture.graph.lock());
        let handle = st.graphs.insert(captured);
        write(graph, handle)
    }

    fn cuStreamIsCapturing | cuStreamIsCapturing_ptsz(stream: usize, status: *mut c_int), null => {
        let mut st = state();
        let stream = st.stream(stream, null)?;
        refuse_implicit(&st, &stream, false)?;
        write(status, status_of(of(&stream).as_deref()))
    }

    fn cuStreamGetCaptureInfo | cuStreamGetCaptureInfo_ptsz(stream: usize, status: *mut c_int, id: *mut u64), null => {
        let mut st = state();
        let stream = st.stream(stream, null)?;
        refuse_implicit(&st, &stream, false)?;
        info(&stream, status, id)
    }

    fn cuStreamGetCaptureInfo_v2 | cuStreamGetCaptureInfo_v2_ptsz(
        stream: usize, status: *mut c_int, id: *mut u64, graph: *mut usize, deps: *mut *const c_void, count: *mut usize,
    ), null => {
        write_optional(graph, 0);
        write_optional(deps, std::ptr::null());
        write_optional(count, 0);
        let mut st = state();
        let stream = st.stream(stream, null)?;
        refuse_implicit(&st, &stream, false)?;
        info(&stream, status, id)
    }

    fn cuStreamGetCaptureInfo_v3 | cuStreamGetCaptureInfo_v3_ptsz(
        stream: usize, status: *mut c_int, id: *mut u64, graph: *mut usize, deps: *mut *const c_void,
        edges: *mut *const c_void, count: *mut usize,
    ), null => {
        write_optional(graph, 0);
        write_optional(deps, std::ptr::null());
        write_optional(edges, std::ptr::null());
        write_optional(count, 0);
        let mut st = state();
        let stream = st.stream(stream, null)?;
        refuse_implicit(&st, &stream, false)?;
        info(&stream, status, id)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) {
        let new = mode_of(read(mode)?)?;
        write(mode, THREAD_MODE.replace(new) as c_int)
    }
}

fn status_of(capture: Option<&Capture>) -> c_int {
    match capture {
        None => 0,
        Some(capture) if capture.is_invalid() => 2,
        Some(_) => 1,
    }
}

fn info(stream: &Stream, status: *mut c_int, id: *mut u64) -> Answer {
    let capture = of(stream);
    if let Some(capture) = capture.as_deref().filter(|capture| !capture.is_invalid()) {
        write_optional(id, capture.id);
    }
    write(status, status_of(capture.as_deref()))
}
