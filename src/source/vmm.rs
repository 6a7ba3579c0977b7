//! Pages: physical memory in handles of 2 to 32 MiB, mapped side by side into one large reservation a device.
//!
//! None of these calls waits for running kernels (measured on an H200: create, map, set access, unmap and release of 2 MiB
//! take 46, 3, 57, 36 and 46 us beside a 10 ms kernel), so memory comes and goes without stopping the device.

use std::collections::HashMap;

use once_cell::sync::Lazy;
use parking_lot::Mutex;

use super::budget::{self, Budget};
use super::ranges::Ranges;
use super::{Arena, Segment, Source, SourceKind};
use crate::driver::{CuError, CuResult, DevicePtr, Driver, PageHandle};

/// A page is at most this large, so that a live block holds no more than this back (contract 6 of the design).
const PAGE_MAX: usize = 32 << 20;
/// A page is at most this share of the device.
const SHARE: usize = 64;
/// Under a limit pages are smaller, for then what live blocks hold back decides whether a request can be served: with 1.15 x the live
/// peak and pages of a 900th of it, one request in 5,000 fails on random sizes, with a 1,800th none.
const LIMITED_SHARE: usize = 1024;
/// The reservation: this many times the device's memory, and less where the driver refuses.
const RESERVE_FACTOR: usize = 16;
const RESERVE_MIN: usize = 1 << 30;
/// Requests from here on ask what is free first (4 us).
const LARGE: usize = 256 << 20;

/// The addresses of one device, a third for each arena: blocks of one kind stay neighbours.
type Ground = [(DevicePtr, Mutex<Ranges>); 3];
/// The reservations, made once a device and kept for the process: addresses cost nothing.
static RESERVED: Lazy<Mutex<HashMap<i32, &'static Ground>>> = Lazy::new(Default::default);

pub struct VmmSource {
    driver: &'static Driver,
    ordinal: i32,
    granularity: usize,
    page_max: usize,
    /// Bytes of the device.
    total: usize,
    /// Who may reach the memory: the device itself, then its peers. `cudaDeviceEnablePeerAccess` opens only `cuMemAlloc`'s
    /// memory, so pages are open to every device that could be a peer, enabled before or after.
    readers: Vec<i32>,
    ground: &'static Ground,
    budget: &'static Budget,
}

/// Pages of device `ordinal`, one of whose contexts must be current.
pub fn vmm(driver: &'static Driver, ordinal: i32) -> CuResult<VmmSource> {
    let granularity = driver.vmm_granularity(ordinal)?;
    let total = driver.device_total(ordinal)?;
    let budget = budget::of(driver, ordinal)?;
    let page_max = match budget.limit() {
        None => total / SHARE,
        Some(limit) => limit.min(total) / LIMITED_SHARE,
    };
    let page_max = 1 << page_max.clamp(granularity, PAGE_MAX).ilog2();
    let known = RESERVED.lock().get(&ordinal).copied();
    let ground = match known {
        Some(ground) => ground,
        None => {
            let (base, size) = reserve(driver, total)?;
            log::debug!("device {ordinal}: {} GiB of addresses at {base:#x}", size >> 30);
            let mut reserved = RESERVED.lock();
            // Should another thread have been faster, this reservation stays unused.
            let third = size / 3 / PAGE_MAX * PAGE_MAX;
            let part =
                |i: usize| (base + (i * third) as u64, Mutex::new(Ranges::new(base + (i * third) as u64, third)));
            let mine = || &*Box::leak(Box::new([part(0), part(1), part(2)]));
            *reserved.entry(ordinal).or_insert_with(mine)
        }
    };
    let peers = (0..driver.device_count()?)
        .filter(|&peer| peer != ordinal && driver.can_access_peer(peer, ordinal).unwrap_or(false));
    let readers = std::iter::once(ordinal).chain(peers).collect();
    Ok(VmmSource { driver, ordinal, granularity, page_max, total, readers, ground, budget })
}

fn reserve(driver: &Driver, total: usize) -> CuResult<(DevicePtr, usize)> {
    let mut size = total.saturating_mul(RESERVE_FACTOR).next_power_of_two().max(RESERVE_MIN);
    loop {
        match driver.va_reserve(size) {
            Ok(base) => return Ok((base, size)),
            Err(e) if size / 2 < RESERVE_MIN => return Err(e),
            Err(_) => size /= 2,
        }
    }
}

impl VmmSource {
    /// The arena's free addresses that `base` belongs to.
    fn ranges_of(&self, base: DevicePtr) -> &Mutex<Ranges> {
        let at = self.ground.iter().rposition(|(start, _)| *start <= base).unwrap_or(0);
        &self.ground[at].1
    }

    /// Creates page handles for `size` bytes, `page` bytes each at most, adding each to `parts`.
    fn create(&self, mut size: usize, page: usize, parts: &mut Vec<(PageHandle, usize)>) -> CuResult<()> {
        while size > 0 {
            let page = page.min(size);
            parts.push((self.driver.page_create(self.ordinal, page)?, page));
            size -= page;
        }
        Ok(())
    }

    /// Maps `parts` side by side at `base` and opens them. On failure nothing stays mapped; the handles stay the caller's.
    fn map(&self, base: DevicePtr, parts: &[(PageHandle, usize)]) -> CuResult<()> {
        let mut at = base;
        let mut mapped = Ok(());
        for &(handle, size) in parts {
            mapped = self.driver.page_map(at, size, handle);
            if mapped.is_err() {
                break;
            }
            at += size as u64;
        }
        let opened = mapped.and_then(|()| self.open(base, (at - base) as usize));
        if opened.is_err() {
            let mut end = base;
            for &(_, size) in parts {
                if end == at {
                    break;
                }
                if let Err(e) = self.driver.page_unmap(end, size) {
                    log::warn!("a page of a failed allocation could not be unmapped: {e:?}");
                }
                end += size as u64;
            }
        }
        opened
    }

    fn open(&self, base: DevicePtr, size: usize) -> CuResult<()> {
        match self.driver.page_access(base, size, &self.readers) {
            // A peer may refuse; the device's own memory must not fail for that.
            Err(e) if self.readers.len() > 1 && e != CuError::OUT_OF_MEMORY => {
                log::debug!("device {}: pages are not open to its peers: {e:?}", self.ordinal);
                self.driver.page_access(base, size, &[self.ordinal])
            }
            other => other,
        }
    }

    /// A segment at `base`, whose addresses were taken, out of `parts` and new pages of `page` bytes up to `size`. On failure all of it goes
    /// back.
    fn build(
        &self,
        base: DevicePtr,
        size: usize,
        page: usize,
        mut parts: Vec<(PageHandle, usize)>,
    ) -> CuResult<Segment> {
        let there: usize = parts.iter().map(|p| p.1).sum();
        let built = self.create(size - there, page, &mut parts).and_then(|()| self.map(base, &parts));
        match built {
            Ok(()) => Ok(Segment { base, size, parts }),
            Err(e) => {
                for &(handle, _) in &parts {
                    if let Err(e) = self.driver.page_release(handle) {
                        log::warn!("a page of a failed allocation could not be given back: {e:?}");
                    }
                }
                self.budget.give(size);
                self.ranges_of(base).lock().give(base, size);
                // Whatever step refused, there is no memory to be had now.
                log::debug!("{size} bytes of pages could not be had: {e:?}");
                Err(if is_final(e) { e } else { CuError::OUT_OF_MEMORY })
            }
        }
    }

    fn rounded(&self, size: usize) -> CuResult<usize> {
        let rounded = size.checked_next_multiple_of(self.granularity).filter(|&size| size <= self.total);
        rounded.ok_or(CuError::OUT_OF_MEMORY)
    }

    /// Unmaps pages; goes on after an error and tells of the first. Pages that cannot be unmapped keep their addresses, so that
    /// nothing is ever mapped over them, and their handles go back at once: the mapping keeps the memory.
    fn unmap(&self, segment: Segment, kept: &mut Vec<(PageHandle, usize)>) -> CuResult<()> {
        let mut first: CuResult<()> = Ok(());
        let mut at = segment.base;
        for (handle, size) in segment.parts {
            match self.driver.page_unmap(at, size) {
                Ok(()) => {
                    self.ranges_of(at).lock().give(at, size);
                    kept.push((handle, size));
                }
                Err(e) => {
                    let released = self.driver.page_release(handle);
                    first = first.and(Err::<(), _>(e)).and(released);
                    self.budget.give(size);
                }
            }
            at += size as u64;
        }
        first
    }
}

impl Source for VmmSource {
    fn acquire(&self, arena: Arena, size: usize) -> CuResult<Segment> {
        let size = self.rounded(size)?;
        // Said before thousands of pages are made and given back: more than there is.
        let free = if size >= LARGE { self.driver.mem_info().map_or(self.total, |(free, _)| free) } else { self.total };
        if size > free {
            return Err(CuError::OUT_OF_MEMORY);
        }
        self.budget.take(size)?;
        let base = self.ground[arena as usize].1.lock().take(size);
        match base {
            Some(base) => self.build(base, size, self.page_max, Vec::new()),
            None => {
                self.budget.give(size);
                Err(CuError::OUT_OF_MEMORY)
            }
        }
    }

    fn gather(
        &self,
        arena: Arena,
        at: Option<DevicePtr>,
        pages: Vec<Segment>,
        size: usize,
        page: usize,
    ) -> CuResult<Segment> {
        let mut parts = Vec::new();
        let mut unmapped = Ok(());
        for page in pages {
            unmapped = unmapped.and(self.unmap(page, &mut parts));
        }
        let there: usize = parts.iter().map(|p| p.1).sum();
        let wanted = unmapped.and_then(|()| self.rounded(size)).map(|size| size.max(there));
        let more = wanted.and_then(|size| self.budget.take(size - there).map(|()| size));
        let base = more.and_then(|size| {
            let mut ranges = self.ground[arena as usize].1.lock();
            let base = at.filter(|&at| ranges.take_at(at, size)).or_else(|| ranges.take(size));
            let base = base.ok_or(CuError::OUT_OF_MEMORY).inspect_err(|_| self.budget.give(size - there));
            base.map(|base| (base, size))
        });
        match base {
            Ok((base, size)) => self.build(base, size, page.clamp(self.granularity, self.page_max), parts),
            Err(e) => {
                for (handle, size) in parts {
                    self.budget.give(size);
                    let _ = self.driver.page_release(handle);
                }
                Err(e)
            }
        }
    }

    fn page_max(&self) -> usize {
        self.page_max
    }

    fn release(&self, segment: Segment) -> CuResult<()> {
        let mut parts = Vec::new();
        let mut first = self.unmap(segment, &mut parts);
        for (handle, size) in parts {
            self.budget.give(size);
            first = first.and(self.driver.page_release(handle));
        }
        first
    }

    fn kind(&self) -> SourceKind {
        SourceKind::Vmm
    }
}

/// Errors that no retry helps: the driver or the context is gone.
fn is_final(e: CuError) -> bool {
    matches!(e, CuError::NOT_INITIALIZED | CuError::DEINITIALIZED | CuError::NO_DEVICE) || e.0 >= 700
}

#[cfg(test)]
mod tests;
