fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libgpupool.so.0");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
