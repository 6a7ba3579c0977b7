//! What the pool must see: copies to the host, streams and contexts that die, captures.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::Ordering::Relaxed;

use super::hooks::hooks;
use crate::driver::{CHANGES, Context, Stream};
use crate::pinned;
use crate::pool::{Pool, fence};
use crate::registry;

type Raw = *mut c_void;

/// A stream argument as it is meant: the `_ptsz` variants mean the thread's own default stream by 0.
fn stream(s: usize, name: &str) -> Stream {
    if s == 0 && name.ends_with("_ptsz") { Stream::PER_THREAD } else { Stream(s) }
}

fn changed() {
    CHANGES.fetch_add(1, Relaxed);
}

fn ends(dies: impl Fn(&Pool) -> bool, end: impl FnOnce() -> u32) -> u32 {
    let (code, gone) = registry::contexts_die(dies, end);
    pinned::forget(|ctx| gone.contains(&ctx));
    code
}

fn begins(s: Stream, call: impl FnOnce() -> u32) -> u32 {
    fence::capture_begins(s);
    changed();
    let code = call();
    if code != 0 {
        fence::capture_ends(s);
    }
    code
}

hooks! {
    table TABLE;

    // ---- copies to the host: a program that lets cudaFree be its only synchronisation reads whole results ----

    fn [cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds] (to: Raw, from: u64, size: usize) = |real, _name| {
        registry::before_copy_to_host();
        real(to, from, size)
    };
    fn [cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz] (to: Raw, from: u64, size: usize, s: usize) = |real, _name| {
        registry::before_copy_to_host();
        real(to, from, size, s)
    };
    fn [cuMemcpy, cuMemcpy_ptds] (to: u64, from: u64, size: usize) = |real, _name| {
        registry::before_copy_to_host();
        real(to, from, size)
    };
    fn [cuMemcpyAsync, cuMemcpyAsync_ptsz] (to: u64, from: u64, size: usize, s: usize) = |real, _name| {
        registry::before_copy_to_host();
        real(to, from, size, s)
    };
    fn [cuMemcpyAtoH_v2, cuMemcpyAtoH_v2_ptds] (to: Raw, from: Raw, offset: usize, size: usize) = |real, _name| {
        registry::before_copy_to_host();
        real(to, from, offset, size)
    };
    fn [cuMemcpyAtoHAsync_v2, cuMemcpyAtoHAsync_v2_ptsz] (
        to: Raw, from: Raw, offset: usize, size: usize, s: usize
    ) = |real, _name| {
        registry::before_copy_to_host();
        real(to, from, offset, size, s)
    };
    fn [cuMemcpy2D_v2, cuMemcpy2D_v2_ptds, cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds, cuMemcpy3D_v2, cuMemcpy3D_v2_ptds] (what: Raw) = |real, _name| {
        registry::before_copy_to_host();
        real(what)
    };
    fn [cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz, cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz] (
        what: Raw, s: usize
    ) = |real, _name| {
        registry::before_copy_to_host();
        real(what, s)
    };
    fn [cuMemcpyBatchAsync, cuMemcpyBatchAsync_ptsz] (
        to: Raw, from: Raw, sizes: Raw, count: usize, how: Raw, which: Raw, hows: usize, failed: Raw, s: usize
    ) = |real, _name| {
        registry::before_copy_to_host();
        real(to, from, sizes, count, how, which, hows, failed, s)
    };
    fn [cuMemcpyBatchAsync_v2, cuMemcpyBatchAsync_v2_ptsz] (
        to: Raw, from: Raw, sizes: Raw, count: usize, how: Raw, which: Raw, hows: usize, s: usize
    ) = |real, _name| {
        registry::before_copy_to_host();
        real(to, from, sizes, count, how, which, hows, s)
    };

    // ---- streams ----

    fn [cuStreamDestroy, cuStreamDestroy_v2] (s: usize) = |real, _name| {
        // Before: the handle may be another stream's at once.
        changed();
        let code = real(s);
        fence::capture_ends(Stream(s));
        code
    };

    // ---- captures: begun before the call that begins them, ended after the one that ends them ----

    fn [cuStreamBeginCapture, cuStreamBeginCapture_ptsz] (s: usize) = |real, name| {
        begins(stream(s, name), || real(s))
    };
    fn [cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz] (s: usize, mode: c_uint) = |real, name| {
        begins(stream(s, name), || real(s, mode))
    };
    fn [cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph_ptsz] (
        s: usize, graph: Raw, after: Raw, edges: Raw, count: usize, mode: c_uint
    ) = |real, name| begins(stream(s, name), || real(s, graph, after, edges, count, mode));
    fn [cuStreamEndCapture, cuStreamEndCapture_ptsz] (s: usize, graph: *mut Raw) = |real, name| {
        let code = real(s, graph);
        fence::capture_ends(stream(s, name));
        changed();
        code
    };

    // ---- contexts ----

    fn [cuCtxDestroy, cuCtxDestroy_v2] (ctx: usize) = |real, _name| {
        ends(|pool| pool.ctx() == Context(ctx), || real(ctx))
    };
    fn [cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2] (device: c_int) = |real, _name| {
        ends(|pool| pool.is_primary() && pool.ordinal() == device, || real(device))
    };
    fn [cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2] (device: c_int) = |real, _name| {
        let gone = || crate::driver::present().is_some_and(|d| d.primary_is_active(device) == Ok(false));
        ends(|pool| pool.is_primary() && pool.ordinal() == device && gone(), || real(device))
    };
}
