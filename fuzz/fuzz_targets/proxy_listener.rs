//! Any bytes on the proxy socket: the listener neither panics nor hangs, and the next caller is served.

#![no_main]

use csi_warden::metrics::Metrics;
use csi_warden::parts::Parts;
use csi_warden::policy::volumes::{Completeness, VolumeTable};
use csi_warden::proxy::gate::{Gate, GateRules};
use csi_warden::proxy::listener::{Proxy, ProxySettings};
use csi_warden::proxy::volumes::Volumes;
use csi_warden::registration::socket::SocketPath;
use libfuzzer_sys::fuzz_target;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// What a well-behaved client begins with; half of the inputs come after it, so that they get past it.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";

struct Bed {
    runtime: Runtime,
    socket: PathBuf,
    parts: Parts,
}

static BED: LazyLock<Bed> = LazyLock::new(|| {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let folder = std::env::temp_dir().join(format!("w-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let socket = folder.join("proxy.sock");
    let parts = Parts::new(CancellationToken::new());
    runtime.block_on(async {
        let settings = ProxySettings {
            socket: SocketPath::at(&socket).unwrap(),
            driver_socket: folder.join("csi.sock"),
            allowed: (0..=u32::from(u16::MAX)).collect(),
        };
        let volumes = Volumes::new(VolumeTable::new(Completeness::Complete));
        let gate = Gate::new("x", GateRules::default(), watch::channel(None).1, volumes, Metrics::new());
        Proxy::listen(settings).unwrap().serve(gate, Metrics::new(), &parts, &parts, parts.stop().clone());
    });
    Bed { runtime, socket, parts }
});

fuzz_target!(|bytes: &[u8]| {
    let bed = &*BED;
    bed.runtime.block_on(async {
        let served = async {
            let mut stream = UnixStream::connect(&bed.socket).await.expect("it listens");
            if bytes.first().is_some_and(|first| first % 2 == 0) {
                drop(stream.write_all(PREFACE).await);
            }
            // It may have hung up already.
            drop(stream.write_all(bytes).await);
            drop(stream.shutdown().await);
            drop(stream.read_to_end(&mut Vec::new()).await);
        };
        timeout(Duration::from_secs(20), served).await.expect("it hangs");
    });
    assert!(!bed.parts.stop().is_cancelled(), "a part has failed");
});
