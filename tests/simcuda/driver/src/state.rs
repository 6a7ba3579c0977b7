//! Everything that lives under the one lock.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};

use crate::backing::{Arena, DeviceFile, Extent};
use crate::capture::Capture;
use crate::codes::{CuResult, OUT_OF_MEMORY};
use crate::config;
use crate::context::Context;
use crate::engine::{Dep, Stream};
use crate::event::Event;
use crate::graph::Graph;
use crate::memory::Allocation;
use crate::pools::Pool;
use crate::vmm::Vmm;

pub struct State {
    pub devices: Vec<Device>,
    pub contexts: Table<Context>,
    pub streams: Table<Arc<Stream>>,
    pub events: Table<Event>,
    pub graphs: Table<Graph>,
    pub graph_execs: Table<Graph>,
    pub pools: Table<Pool>,
    /// Device, managed, pinned, registered and imported memory by base address. VMM mappings are in `vmm`.
    pub allocations: BTreeMap<u64, Allocation>,
    pub vmm: Vmm,
    pub arena: Arena,
    pub captures: Vec<Arc<Capture>>,
    /// Handles opened from other processes: (process, offset in its file) to the address here.
    pub imports: HashMap<(i32, u64), u64>,
    next_buffer: u64,
    next_context: u64,
}

pub struct Device {
    pub file: Arc<DeviceFile>,
    next_offset: u64,
    pub total: u64,
    /// Physical memory in use.
    pub used: u64,
    /// Stream-ordered frees that a stream has yet to reach.
    pub frees_pending: usize,
    pub primary: Primary,
    pub default_pool: usize,
    pub current_pool: usize,
}

/// The primary context of a device. Its handle stays the same for the life of the process, its id does not.
#[derive(Default)]
pub struct Primary {
    pub handle: usize,
    pub references: u32,
    pub flags: u32,
}

pub fn state() -> MutexGuard<'static, State> {
    static STATE: OnceLock<Mutex<State>> = OnceLock::new();
    STATE.get_or_init(|| Mutex::new(State::new())).lock()
}

impl State {
    fn new() -> State {
        let config = config::get();
        let mut pools = Table::new(0x5c00_0000_0000, Reuse::Never);
        let devices = (0..config.devices)
            .map(|ordinal| {
                let pool = pools.insert(Pool::new(ordinal));
                Device {
                    file: Arc::new(DeviceFile::create(ordinal)),
                    next_offset: 0,
                    total: config.memory,
                    used: 0,
                    frees_pending: 0,
                    primary: Primary::default(),
                    default_pool: pool,
                    current_pool: pool,
                }
            })
            .collect();
        State {
            devices,
            contexts: Table::new(0x5a00_0000_0000, Reuse::Never),
            streams: Table::new(0x5b00_0000_0000, Reuse::LastFirst),
            events: Table::new(0x5d00_0000_0000, Reuse::LastFirst),
            graphs: Table::new(0x5e00_0000_0000, Reuse::LastFirst),
            graph_execs: Table::new(0x5f00_0000_0000, Reuse::LastFirst),
            pools,
            allocations: BTreeMap::new(),
            vmm: Vmm::default(),
            arena: Arena::new(),
            captures: Vec::new(),
            imports: HashMap::new(),
            next_buffer: 1,
            next_context: 1,
        }
    }

    pub fn buffer_id(&mut self) -> u64 {
        self.next_buffer += 1;
        self.next_buffer
    }

    pub fn context_id(&mut self) -> u64 {
        self.next_context += 1;
        self.next_context
    }

    pub fn device(&mut self, ordinal: i32) -> &mut Device {
        &mut self.devices[ordinal as usize]
    }

    /// The allocation that `address` lies in.
    pub fn allocation(&self, address: u64) -> Option<&Allocation> {
        let (_, found) = self.allocations.range(..=address).next_back()?;
        (address - found.base < found.size as u64).then_some(found)
    }

    /// Unfinished work of every stream on a device.
    pub fn device_pending(&self, ordinal: i32) -> Vec<Dep> {
        self.contexts.iter().filter(|cx| cx.device == ordinal).flat_map(Context::pending).collect()
    }
}

impl Device {
    /// Takes physical memory; 2 when there is not enough.
    pub fn take(&mut self, bytes: u64, align: u64) -> CuResult<Extent> {
        if bytes > self.total - self.used {
            return Err(OUT_OF_MEMORY);
        }
        self.used += bytes;
        Ok(self.unaccounted(bytes, align))
    }

    /// An extent that does not count as this device's memory: managed memory that is not resident, host memory.
    pub fn unaccounted(&mut self, bytes: u64, align: u64) -> Extent {
        let offset = self.next_offset.next_multiple_of(align);
        self.next_offset = offset + bytes;
        Extent { file: self.file.clone(), offset, bytes }
    }
}

/// Whether a handle that was given up is handed out again.
#[derive(PartialEq, Eq)]
pub enum Reuse {
    Never,
    /// As the real driver does with streams: the last one given up comes first.
    LastFirst,
}

/// Objects by handle. A handle looks like a pointer and is none: following it faults.
pub struct Table<T> {
    first: usize,
    slots: Vec<Option<T>>,
    free: Vec<usize>,
    reuse: Reuse,
}

const STEP: usize = 64;

impl<T> Table<T> {
    pub fn new(first: usize, reuse: Reuse) -> Table<T> {
        Table { first, slots: Vec::new(), free: Vec::new(), reuse }
    }

    pub fn insert(&mut self, value: T) -> usize {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[index] = Some(value);
        self.first + index * STEP
    }

    /// Puts an object back under a handle that it had before.
    pub fn revive(&mut self, handle: usize, value: T) {
        let index = self.index(handle).expect("a handle of this table");
        self.slots[index] = Some(value);
    }

    fn index(&self, handle: usize) -> Option<usize> {
        let distance = handle.checked_sub(self.first)?;
        (distance.is_multiple_of(STEP) && distance / STEP < self.slots.len()).then_some(distance / STEP)
    }

    /// Whether the handle was ever given out.
    pub fn knows(&self, handle: usize) -> bool {
        self.index(handle).is_some()
    }

    pub fn get(&self, handle: usize) -> Option<&T> {
        self.slots[self.index(handle)?].as_ref()
    }

    pub fn get_mut(&mut self, handle: usize) -> Option<&mut T> {
        let index = self.index(handle)?;
        self.slots[index].as_mut()
    }

    pub fn remove(&mut self, handle: usize) -> Option<T> {
        let index = self.index(handle)?;
        let value = self.slots[index].take()?;
        if self.reuse == Reuse::LastFirst {
            self.free.push(index);
        }
        Some(value)
    }

    pub fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        for index in 0..self.slots.len() {
            if self.slots[index].as_ref().is_some_and(|value| !keep(value)) {
                self.remove(self.first + index * STEP);
            }
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().flatten()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().flatten()
    }
}
