//! Segments that are one block of the driver's own allocator each: `cuMemAlloc` where VMM is missing or not wanted, and
//! managed memory.

use crate::driver::{Context, CuResult, CurrentContext, Driver, PageHandle, Stream};

use super::{Segment, Source, SourceKind};

pub struct BlockSource {
    driver: &'static Driver,
    ctx: Context,
    /// Managed memory moves to this device; None is `cuMemAlloc`.
    managed_on: Option<i32>,
}

/// `cuMemAlloc` in `ctx`.
pub fn device(driver: &'static Driver, ctx: Context) -> BlockSource {
    BlockSource { driver, ctx, managed_on: None }
}

/// Managed memory, prefetched to device `ordinal`, whose context is `ctx`.
pub fn managed(driver: &'static Driver, ctx: Context, ordinal: i32) -> BlockSource {
    BlockSource { driver, ctx, managed_on: Some(ordinal) }
}

impl Source for BlockSource {
    fn acquire(&self, size: usize) -> CuResult<Segment> {
        let _ctx = CurrentContext::enter(self.driver, self.ctx)?;
        let base = match self.managed_on {
            None => self.driver.mem_alloc(size)?,
            Some(ordinal) => {
                let base = self.driver.mem_alloc_managed(size)?;
                // A hint: devices without it fault the pages in.
                if let Err(e) = self.driver.mem_prefetch(base, size, ordinal, Stream::LEGACY) {
                    log::debug!("managed memory was not prefetched: {e:?}");
                }
                base
            }
        };
        Ok(Segment { base, size, parts: vec![(PageHandle(0), size)] })
    }

    fn release(&self, segment: Segment) -> CuResult<()> {
        let _ctx = CurrentContext::enter(self.driver, self.ctx)?;
        self.driver.mem_free(segment.base)
    }

    fn kind(&self) -> SourceKind {
        if self.managed_on.is_some() { SourceKind::Managed } else { SourceKind::Device }
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
        let sources = [device(sim.driver, ctx), managed(sim.driver, ctx, 0)];
        let other = sim.context(1);
        for source in &sources {
            let before = sim.live("allocations");
            let free_here = sim.driver.mem_info().unwrap().0;
            let segment = source.acquire(SIZE).unwrap();
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
            [(device(sim.driver, ctx), "cuMemAlloc"), (managed(sim.driver, ctx, 0), "cuMemAllocManaged")]
        {
            sim.fail(&format!("{call}:1"));
            let refused = source.acquire(SIZE).map(|s| s.base);
            sim.fail("");
            assert_eq!(refused, Err(CuError::OUT_OF_MEMORY), "{call}");
            assert_eq!(sim.live("allocations"), before);
        }
        let source = managed(sim.driver, ctx, 0);
        sim.fail("cuMemPrefetchAsync:1:801");
        let segment = source.acquire(SIZE);
        sim.fail("");
        source.release(segment.expect("the prefetch is a hint")).unwrap();
        assert_eq!(sim.live("allocations"), before);
    }
}
