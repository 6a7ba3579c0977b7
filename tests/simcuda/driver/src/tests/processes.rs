//! More than one process: a forked child, and memory shared with another process.

use super::*;

#[test]
fn a_forked_child_has_no_device() {
    let _session = session();
    let p = memory(4096);
    // SAFETY: the child only calls the driver, which touches nothing but atomics there, and leaves.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            let mut q = 0;
            let answers = [cuMemAlloc_v2(&mut q, 4096), cuMemFree_v2(p), cuInit(0)];
            libc::_exit((answers != [3, 3, 3]) as c_int);
        }
        let mut status = -1;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        assert_eq!(status, 0);
    }
    ok!(cuMemFree_v2(p));
}

const IPC_HANDLE: &str = "SIMCUDA_TEST_IPC_HANDLE";

/// Not a test of its own: the other process of the next one.
#[test]
fn ipc_child() {
    let Ok(text) = std::env::var(IPC_HANDLE) else {
        return;
    };
    let _session = session();
    let mut handle = IpcMemHandle { reserved: [0; 64] };
    for (byte, digits) in handle.reserved.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap();
    }
    let (mut p, mut again) = (0, 0);
    ok!(cuIpcOpenMemHandle_v2(&mut p, handle, 1));
    ok!(cuIpcOpenMemHandle_v2(&mut again, handle, 1));
    assert_eq!(p, again);
    assert_eq!((byte(p), byte(p + 1)), (77, 78));
    ok!(cuMemsetD8_v2(p, 99, 1));
    ok!(cuCtxSynchronize());
    assert_eq!(cu!(cuMemFree_v2(p)), 1);
    ok!(cuIpcCloseMemHandle(p));
    ok!(cuIpcCloseMemHandle(p));
    assert_eq!(cu!(cuIpcCloseMemHandle(p)), 1);
}

#[test]
fn memory_is_shared_between_processes() {
    let _session = session();
    let (before, p) = (memory(4096), memory(4096));
    ok!(cuMemsetD8_v2(p, 77, 1));
    ok!(cuMemsetD8_v2(p + 1, 78, 1));
    ok!(cuCtxSynchronize());
    let mut handle = IpcMemHandle { reserved: [0; 64] };
    ok!(cuIpcGetMemHandle(&mut handle, p + 100));
    let mut here = 0;
    assert_ne!(cu!(cuIpcOpenMemHandle_v2(&mut here, handle, 1)), 0);
    let text: String = handle.reserved.iter().map(|byte| format!("{byte:02x}")).collect();
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "tests::processes::ipc_child", "--nocapture"])
        .env(IPC_HANDLE, text)
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    assert_eq!(byte(p), 99);
    ok!(cuMemFree_v2(p));
    ok!(cuMemFree_v2(before));

    let mut va = 0;
    ok!(cuMemAddressReserve(&mut va, PAGE_BYTES, 0, 0, 0));
    let page = page(PAGE_BYTES);
    ok!(cuMemMap(va, PAGE_BYTES, 0, page, 0));
    assert_eq!(cu!(cuIpcGetMemHandle(&mut handle, va)), 1);
    ok!(cuMemUnmap(va, PAGE_BYTES));
    ok!(cuMemRelease(page));
    ok!(cuMemAddressFree(va, PAGE_BYTES));
}
