//! Segments that are one block of the driver's own allocator each: `cuMemAlloc` where VMM is missing or not wanted, and
//! managed memory.

use crate::driver::{Context, CuResult, CurrentContext, DevicePtr, Driver, PageHandle, Stream};

use super::budget::{self, Budget};
use super::{Arena, Segment, Source, SourceKind};

pub struct BlockSource {
    driver: &'static Driver,
    ctx: Context,
    ordinal: i32,
    /// Managed memory, moved to the device; else `cuMemAlloc`.
    managed: bool,
}

/// `cuMemAlloc` in `ctx`, a context of device `ordinal`.
pub fn device(driver: &'static Driver, ctx: Context, ordinal: i32) -> BlockSource {
    BlockSource { driver, ctx, ordinal, managed: false }
}

/// Managed memory, prefetched to device `ordinal`, whose context is `ctx`.
pub fn managed(driver: &'static Driver, ctx: Context, ordinal: i32) -> BlockSource {
    BlockSource { driver, ctx, ordinal, managed: true }
}

impl BlockSource {
    fn budget(&self) -> CuResult<&'static Budget> {
        budget::of(self.driver, self.ordinal)
    }

    fn allocate(&self, size: usize) -> CuResult<DevicePtr> {
        let _ctx = CurrentContext::enter(self.driver, self.ctx)?;
        if !self.managed {
            return self.driver.mem_alloc(size);
        }
        let base = self.driver.mem_alloc_managed(size)?;
        // A hint: devices without it fault the pages in.
        if let Err(e) = self.driver.mem_prefetch(base, size, self.ordinal, Stream::LEGACY) {
            log::debug!("managed memory was not prefetched: {e:?}");
        }
        Ok(base)
    }
}

impl Source for BlockSource {
    fn acquire(&self, _arena: Arena, size: usize) -> CuResult<Segment> {
        let budget = self.budget()?;
        budget.take(size)?;
        let base = self.allocate(size).inspect_err(|_| budget.give(size))?;
        Ok(Segment { base, size, parts: vec![(PageHandle(0), size)] })
    }

    fn release(&self, segment: Segment) -> CuResult<()> {
        let _ctx = CurrentContext::enter(self.driver, self.ctx)?;
        self.driver.mem_free(segment.base)?;
        self.budget()?.give(segment.size);
        Ok(())
    }

    fn forget(&self, segment: Segment) {
        if let Ok(budget) = self.budget() {
            budget.give(segment.size);
        }
    }

    fn kind(&self) -> SourceKind {
        if self.managed { SourceKind::Managed } else { SourceKind::Device }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::CuError;
    use crate::testing::sim;

    const SIZE: usize = 3 << 20;

    #[test]
    fn blocks_come_and_go_whatever_context_is_current() {
        let sim = sim();
        let ctx = sim.context(0);
        let sources = [device(sim.driver, ctx, 0), managed(sim.driver, ctx, 0)];
        let other = sim.context(1);
        for source in &sources {
            let before = sim.live("allocations");
            let free_here = sim.driver.mem_info().unwrap().0;
            let segment = source.acquire(Arena::Large, SIZE).unwrap();
            assert_eq!(sim.driver.mem_info().unwrap().0, free_here, "memory of the current device was taken");
            assert_eq!(segment.pages().collect::<Vec<_>>(), [(segment.base, SIZE)]);
            assert_eq!(sim.driver.ctx_current(), Ok(Some(other)), "the caller's context stays");
            source.release(segment).unwrap();
            assert_eq!(sim.driver.ctx_current(), Ok(Some(other)));
            assert_eq!(sim.live("allocations"), before);
        }
    }

    #[test]
    fn refusals_hold_nothing_and_a_refused_prefetch_is_no_refusal() {
        let sim = sim();
        let ctx = sim.context(0);
        let before = sim.live("allocations");
        for (source, call) in
            [(device(sim.driver, ctx, 0), "cuMemAlloc"), (managed(sim.driver, ctx, 0), "cuMemAllocManaged")]
        {
            sim.fail(&format!("{call}:1"));
            let refused = source.acquire(Arena::Large, SIZE).map(|s| s.base);
            sim.fail("");
            assert_eq!(refused, Err(CuError::OUT_OF_MEMORY), "{call}");
            assert_eq!(sim.live("allocations"), before);
        }
        let source = managed(sim.driver, ctx, 0);
        sim.fail("cuMemPrefetchAsync:1:801");
        let segment = source.acquire(Arena::Large, SIZE);
        sim.fail("");
        source.release(segment.expect("the prefetch is a hint")).unwrap();
        assert_eq!(sim.live("allocations"), before);
    }
}
