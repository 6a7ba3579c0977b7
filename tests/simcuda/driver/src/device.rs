//! Initialisation and what devices say of themselves.

use std::ffi::{CStr, c_char, c_int};

use crate::call::{self, driver_fns};
use crate::codes::*;
use crate::config;
use crate::state::state;

driver_fns! {
    any_time fn cuInit(flags: u32) {
        if call::forked() {
            return Err(NOT_INITIALIZED);
        }
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if config::get().devices == 0 {
            return Err(NO_DEVICE);
        }
        drop(state());
        call::initialize();
        crate::quirks::at_init()
    }

    any_time fn cuDriverGetVersion(version: *mut c_int) {
        write(version, config::get().version)
    }

    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        check(ordinal)?;
        write(device, ordinal)
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        write(count, config::get().devices)
    }

    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) {
        check(device)?;
        write_text(name, len, "simcuda software GPU")
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) {
        check(device)?;
        write(bytes, config::get().memory as usize)
    }

    fn cuDeviceGetUuid(uuid: *mut Uuid, device: c_int) {
        write_uuid(uuid, device)
    }

    fn cuDeviceGetUuid_v2(uuid: *mut Uuid, device: c_int) {
        write_uuid(uuid, device)
    }

    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) {
        check(device)?;
        write(value, attribute_value(attribute, device).ok_or(INVALID_VALUE)?)
    }

    fn cuDeviceComputeCapability(major: *mut c_int, minor: *mut c_int, device: c_int) {
        check(device)?;
        write(major, 9)?;
        write(minor, 0)
    }

    fn cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: c_int) {
        check(device)?;
        write_text(id, len, &bus_id(device))
    }

    fn cuDeviceGetByPCIBusId(device: *mut c_int, id: *const c_char) {
        if id.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller vouches for the C string.
        let asked = unsafe { CStr::from_ptr(id) }.to_string_lossy().to_ascii_uppercase();
        let found = (0..config::get().devices).find(|&d| bus_id(d).ends_with(&asked)).ok_or(INVALID_DEVICE)?;
        write(device, found)
    }

    fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
        check(device)?;
        check(peer)?;
        write(can, (device != peer) as c_int)
    }

    fn cuDeviceGetP2PAttribute(value: *mut c_int, attribute: c_int, source: c_int, destination: c_int) {
        check(source)?;
        check(destination)?;
        if source == destination {
            return Err(INVALID_DEVICE);
        }
        write(value, match attribute {
            1 => 0,
            2..=4 => 1,
            _ => return Err(INVALID_VALUE),
        })
    }

    fn cuFlushGPUDirectRDMAWrites(_target: c_int, _scope: c_int) {
        Ok(())
    }

    any_time fn cuGetErrorName(error: u32, text: *mut *const c_char) {
        let found = describe(error);
        write(text, found.map_or(std::ptr::null(), |(name, _)| name.as_ptr().cast()))?;
        found.map(|_| ()).ok_or(INVALID_VALUE)
    }

    any_time fn cuGetErrorString(error: u32, text: *mut *const c_char) {
        let found = describe(error);
        write(text, found.map_or(std::ptr::null(), |(_, long)| long.as_ptr().cast()))?;
        found.map(|_| ()).ok_or(INVALID_VALUE)
    }
}

/// Whether `ordinal` is a device.
pub fn check(ordinal: c_int) -> Answer {
    if (0..config::get().devices).contains(&ordinal) { Ok(()) } else { Err(INVALID_DEVICE) }
}

fn bus_id(device: c_int) -> String {
    format!("0000:{:02X}:00.0", device + 1)
}

fn write_uuid(uuid: *mut Uuid, device: c_int) -> Answer {
    check(device)?;
    let mut bytes = [0; 16];
    for (byte, text) in bytes.iter_mut().zip(*b"simcuda-device-\0") {
        *byte = text as c_char;
    }
    bytes[15] = device as c_char;
    write(uuid, Uuid { bytes })
}

/// Writes as much of `text` as fits, always with a NUL.
fn write_text(to: *mut c_char, len: c_int, text: &str) -> Answer {
    if to.is_null() || len < 1 {
        return Err(INVALID_VALUE);
    }
    let n = text.len().min(len as usize - 1);
    // SAFETY: the caller vouches for `len` bytes at `to`; n < len.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, n);
        to.add(n).write(0);
    }
    Ok(())
}

/// Known attributes answer as an H200 does where programs ask for them, else 0; unknown ones give None.
fn attribute_value(attribute: c_int, device: c_int) -> Option<c_int> {
    let vmm = config::get().vmm as c_int;
    Some(match attribute {
        1 => 1024,          // MAX_THREADS_PER_BLOCK
        2 | 3 => 1024,      // MAX_BLOCK_DIM_X, _Y
        4 => 64,            // MAX_BLOCK_DIM_Z
        5 => i32::MAX,      // MAX_GRID_DIM_X
        6 | 7 => 65535,     // MAX_GRID_DIM_Y, _Z
        8 => 49152,         // MAX_SHARED_MEMORY_PER_BLOCK
        9 => 65536,         // TOTAL_CONSTANT_MEMORY
        10 => 32,           // WARP_SIZE
        11 => i32::MAX,     // MAX_PITCH
        12 => 65536,        // MAX_REGISTERS_PER_BLOCK
        13 => 1_980_000,    // CLOCK_RATE, kHz
        14 => 512,          // TEXTURE_ALIGNMENT
        15 => 1,            // GPU_OVERLAP
        16 => 132,          // MULTIPROCESSOR_COUNT
        19 => 1,            // CAN_MAP_HOST_MEMORY
        21 | 69 => 131_072, // MAXIMUM_TEXTURE1D_WIDTH, _LINEAR_WIDTH
        30 => 512,          // SURFACE_ALIGNMENT
        31 => 1,            // CONCURRENT_KERNELS
        32 => 1,            // ECC_ENABLED
        33 => device + 1,   // PCI_BUS_ID
        36 => 3_201_000,    // MEMORY_CLOCK_RATE, kHz
        37 => 6144,         // GLOBAL_MEMORY_BUS_WIDTH
        38 => 62_914_560,   // L2_CACHE_SIZE
        39 => 2048,         // MAX_THREADS_PER_MULTIPROCESSOR
        40 => 3,            // ASYNC_ENGINE_COUNT
        41 => 1,            // UNIFIED_ADDRESSING
        51 => 32,           // TEXTURE_PITCH_ALIGNMENT
        75 => 9,            // COMPUTE_CAPABILITY_MAJOR
        76 => 0,            // COMPUTE_CAPABILITY_MINOR
        78 => 1,            // STREAM_PRIORITIES_SUPPORTED
        79 | 80 => 1,       // GLOBAL_L1_CACHE_SUPPORTED, LOCAL_
        81 => 233_472,      // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
        82 => 65536,        // MAX_REGISTERS_PER_MULTIPROCESSOR
        83 => 1,            // MANAGED_MEMORY
        85 => device,       // MULTI_GPU_BOARD_GROUP_ID
        87 => 2,            // SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO
        88 => 1,            // PAGEABLE_MEMORY_ACCESS
        89..=91 => 1,       // CONCURRENT_MANAGED_ACCESS, COMPUTE_PREEMPTION, HOST_POINTER_FOR_REGISTERED_MEM
        92..=94 => 1,       // CAN_USE_STREAM_MEM_OPS_V1, 64_BIT, WAIT_VALUE_NOR
        95 => 1,            // COOPERATIVE_LAUNCH
        97 => 232_448,      // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        99 => 1,            // HOST_REGISTER_SUPPORTED
        102 | 103 => vmm,   // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        106 => 32,          // MAX_BLOCKS_PER_MULTIPROCESSOR
        110 => vmm,         // GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        111 => 1024,        // RESERVED_SHARED_MEMORY_PER_BLOCK
        113 => 1,           // READ_ONLY_HOST_REGISTER_SUPPORTED
        115 | 116 => 1,     // MEMORY_POOLS_SUPPORTED, GPU_DIRECT_RDMA_SUPPORTED
        117 => 1,           // GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
        118 => 100,         // GPU_DIRECT_RDMA_WRITES_ORDERING
        119 => 0,           // MEMPOOL_SUPPORTED_HANDLE_TYPES
        122 | 123 => 1,     // CAN_USE_64_BIT_STREAM_MEM_OPS, WAIT_VALUE_NOR
        134 => 0,           // HOST_NUMA_ID
        141 => vmm,         // HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        _ if (1..=148).contains(&attribute) => 0,
        _ => return None,
    })
}
