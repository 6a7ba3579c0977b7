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
