//! Memset and memcpy.
//!
//! As on the real driver, the calls without a stream run on the NULL stream; those that touch host memory wait for it, while
//! memsets and copies within device memory return at once. A copy of pageable host memory waits even when called `Async`.

use crate::call::driver_fns;
use crate::codes::*;
use crate::engine::Op;
use crate::state::{State, state};
use crate::stream::{Null, finish};

/// Whether the host waits for a copy.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Wait {
    Yes,
    No,
    /// As an `Async` copy does: only where pageable memory is involved.
    IfPageable,
    /// As `cuMemcpy` does: unless both sides are device memory.
    UnlessDevice,
}

driver_fns! {
    fn cuMemcpy | cuMemcpy_ptds(dst: u64, src: u64, bytes: usize), null => {
        copy(dst, src, bytes, 0, null, Wait::UnlessDevice)
    }

    fn cuMemcpyAsync | cuMemcpyAsync_ptsz(dst: u64, src: u64, bytes: usize, stream: usize), null => {
        copy(dst, src, bytes, stream, null, Wait::IfPageable)
    }

    fn cuMemcpyHtoD_v2 | cuMemcpyHtoD_v2_ptds(dst: u64, src: u64, bytes: usize), null => {
        copy(dst, src, bytes, 0, null, Wait::Yes)
    }

    fn cuMemcpyDtoH_v2 | cuMemcpyDtoH_v2_ptds(dst: u64, src: u64, bytes: usize), null => {
        copy(dst, src, bytes, 0, null, Wait::Yes)
    }

    fn cuMemcpyDtoD_v2 | cuMemcpyDtoD_v2_ptds(dst: u64, src: u64, bytes: usize), null => {
        copy(dst, src, bytes, 0, null, Wait::No)
    }

    fn cuMemcpyHtoDAsync_v2 | cuMemcpyHtoDAsync_v2_ptsz(dst: u64, src: u64, bytes: usize, stream: usize), null => {
        copy(dst, src, bytes, stream, null, Wait::IfPageable)
    }

    fn cuMemcpyDtoHAsync_v2 | cuMemcpyDtoHAsync_v2_ptsz(dst: u64, src: u64, bytes: usize, stream: usize), null => {
        copy(dst, src, bytes, stream, null, Wait::IfPageable)
    }

    fn cuMemcpyDtoDAsync_v2 | cuMemcpyDtoDAsync_v2_ptsz(dst: u64, src: u64, bytes: usize, stream: usize), null => {
        copy(dst, src, bytes, stream, null, Wait::No)
    }

    fn cuMemcpyPeer | cuMemcpyPeer_ptds(dst: u64, to: usize, src: u64, from: usize, bytes: usize), null => {
        check_peers(to, from)?;
        copy(dst, src, bytes, 0, null, Wait::No)
    }

    fn cuMemcpyPeerAsync | cuMemcpyPeerAsync_ptsz(
        dst: u64, to: usize, src: u64, from: usize, bytes: usize, stream: usize,
    ), null => {
        check_peers(to, from)?;
        copy(dst, src, bytes, stream, null, Wait::No)
    }

    fn cuMemsetD8_v2 | cuMemsetD8_v2_ptds(dst: u64, value: u8, count: usize), null => {
        set(dst, value as u32, 1, count, 0, null)
    }

    fn cuMemsetD16_v2 | cuMemsetD16_v2_ptds(dst: u64, value: u16, count: usize), null => {
        set(dst, value as u32, 2, count, 0, null)
    }

    fn cuMemsetD32_v2 | cuMemsetD32_v2_ptds(dst: u64, value: u32, count: usize), null => {
        set(dst, value, 4, count, 0, null)
    }

    fn cuMemsetD8Async | cuMemsetD8Async_ptsz(dst: u64, value: u8, count: usize, stream: usize), null => {
        set(dst, value as u32, 1, count, stream, null)
    }

    fn cuMemsetD16Async | cuMemsetD16Async_ptsz(dst: u64, value: u16, count: usize, stream: usize), null => {
        set(dst, value as u32, 2, count, stream, null)
    }

    fn cuMemsetD32Async | cuMemsetD32Async_ptsz(dst: u64, value: u32, count: usize, stream: usize), null => {
        set(dst, value, 4, count, stream, null)
    }
}

fn check_peers(to: usize, from: usize) -> Answer {
    let mut st = state();
    st.context(to)?;
    st.context(from).map(|_| ())
}

/// A range that begins in an allocation must end in it. Elsewhere the access itself tells, by a fault.
fn check_range(st: &State, start: u64, bytes: usize) -> Answer {
    if start == 0 {
        return Err(INVALID_VALUE);
    }
    match st.allocation(start) {
        Some(found) if bytes as u64 > found.base + found.size as u64 - start => Err(INVALID_VALUE),
        _ => Ok(()),
    }
}

fn is_device(st: &State, address: u64) -> bool {
    st.allocation(address).map_or_else(|| st.vmm.mapping(address).is_some(), |found| !found.is_host())
}

fn is_pageable(st: &State, address: u64) -> bool {
    st.allocation(address).is_none() && st.vmm.mapping(address).is_none()
}

fn copy(dst: u64, src: u64, bytes: usize, stream: usize, null: Null, wait: Wait) -> Answer {
    let mut st = state();
    let stream = st.stream(stream, null)?;
    if bytes == 0 {
        return Ok(());
    }
    check_range(&st, dst, bytes)?;
    check_range(&st, src, bytes)?;
    let wait = match wait {
        Wait::Yes => true,
        Wait::No => false,
        Wait::IfPageable => is_pageable(&st, dst) || is_pageable(&st, src),
        Wait::UnlessDevice => !(is_device(&st, dst) && is_device(&st, src)),
    };
    let submitted = st.submit(&stream, Op::Copy { dst, src, bytes })?;
    drop(st);
    if wait {
        finish(submitted);
    }
    Ok(())
}

fn set(dst: u64, value: u32, width: usize, count: usize, stream: usize, null: Null) -> Answer {
    let mut st = state();
    let stream = st.stream(stream, null)?;
    if count == 0 {
        return Ok(());
    }
    let bytes = count.checked_mul(width).ok_or(INVALID_VALUE)?;
    if !dst.is_multiple_of(width as u64) {
        return Err(INVALID_VALUE);
    }
    check_range(&st, dst, bytes)?;
    st.submit(&stream, Op::Set { dst, value, width, count }).map(|_| ())
}
