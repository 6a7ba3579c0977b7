//! Streams, events, captures, host functions.

use std::ffi::{c_int, c_uint, c_void};

use crate::driver::context;

type Handle = *mut c_void;
type HostFn = unsafe extern "C" fn(*mut c_void);

api! {
    fn cudaStreamCreate(stream: *mut Handle) {
        context()?;
        cu!("cuStreamCreate", stream => *mut Handle, 0 => c_uint)
    }
    fn cudaStreamCreateWithFlags(stream: *mut Handle, flags: c_uint) {
        context()?;
        cu!("cuStreamCreate", stream => *mut Handle, flags => c_uint)
    }
    fn cudaStreamCreateWithPriority(stream: *mut Handle, flags: c_uint, priority: c_int) {
        context()?;
        cu!("cuStreamCreateWithPriority", stream => *mut Handle, flags => c_uint, priority => c_int)
    }
    fn cudaStreamDestroy(stream: Handle) {
        context()?;
        cu!("cuStreamDestroy", stream => Handle)
    }
    fn cudaStreamSynchronize(stream: Handle) {
        context()?;
        cu!("cuStreamSynchronize", stream => Handle)
    }
    fn cudaStreamQuery(stream: Handle) {
        context()?;
        cu!("cuStreamQuery", stream => Handle)
    }
    fn cudaStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) {
        context()?;
        cu!("cuStreamWaitEvent", stream => Handle, event => Handle, flags => c_uint)
    }
    fn cudaStreamGetFlags(stream: Handle, flags: *mut c_uint) {
        context()?;
        cu!("cuStreamGetFlags", stream => Handle, flags => *mut c_uint)
    }
    fn cudaStreamGetPriority(stream: Handle, priority: *mut c_int) {
        context()?;
        cu!("cuStreamGetPriority", stream => Handle, priority => *mut c_int)
    }
    fn cudaStreamGetId(stream: Handle, id: *mut u64) {
        context()?;
        cu!("cuStreamGetId", stream => Handle, id => *mut u64)
    }
    fn cudaStreamIsCapturing(stream: Handle, status: *mut c_int) {
        context()?;
        cu!("cuStreamIsCapturing", stream => Handle, status => *mut c_int)
    }
    fn cudaStreamBeginCapture(stream: Handle, mode: c_int) {
        context()?;
        cu!("cuStreamBeginCapture", stream => Handle, mode => c_int)
    }
    fn cudaStreamEndCapture(stream: Handle, graph: *mut Handle) {
        context()?;
        cu!("cuStreamEndCapture", stream => Handle, graph => *mut Handle)
    }
    fn cudaGraphDestroy(graph: Handle) {
        cu!("cuGraphDestroy", graph => Handle)
    }
    fn cudaThreadExchangeStreamCaptureMode(mode: *mut c_int) {
        cu!("cuThreadExchangeStreamCaptureMode", mode => *mut c_int)
    }
    fn cudaLaunchHostFunc(stream: Handle, f: HostFn, data: *mut c_void) {
        context()?;
        cu!("cuLaunchHostFunc", stream => Handle, f => HostFn, data => *mut c_void)
    }
    fn cudaEventCreate(event: *mut Handle) {
        context()?;
        cu!("cuEventCreate", event => *mut Handle, 0 => c_uint)
    }
    fn cudaEventCreateWithFlags(event: *mut Handle, flags: c_uint) {
        context()?;
        cu!("cuEventCreate", event => *mut Handle, flags => c_uint)
    }
    fn cudaEventRecord(event: Handle, stream: Handle) {
        context()?;
        cu!("cuEventRecord", event => Handle, stream => Handle)
    }
    fn cudaEventQuery(event: Handle) {
        cu!("cuEventQuery", event => Handle)
    }
    fn cudaEventSynchronize(event: Handle) {
        cu!("cuEventSynchronize", event => Handle)
    }
    fn cudaEventElapsedTime(ms: *mut f32, start: Handle, end: Handle) {
        cu!("cuEventElapsedTime", ms => *mut f32, start => Handle, end => Handle)
    }
    fn cudaEventDestroy(event: Handle) {
        cu!("cuEventDestroy", event => Handle)
    }
}
