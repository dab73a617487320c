//! A TCP proxy that stands between two engines and can cut, stall or refuse.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// The kind byte of a connection, behind the four bytes of magic.
const KIND_AT: usize = 4;
const KIND_CONTROL: u8 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Control,
    Lane,
}

#[derive(Default)]
struct State {
    /// By kind.
    stalled: [AtomicBool; 2],
    refusing: AtomicBool,
    /// Both ends of every connection.
    connections: Mutex<Vec<(Kind, TcpStream, TcpStream)>>,
}

/// Forwards connections to an address until told otherwise.
pub struct Proxy {
    addr: SocketAddr,
    state: Arc<State>,
}

impl Proxy {
    pub fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for inbound in listener.incoming() {
                let Ok(mut inbound) = inbound else { continue };
                if shared.refusing.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(mut outbound) = TcpStream::connect(target) else { continue };
                let mut preamble = [0; KIND_AT + 1];
                if inbound.read_exact(&mut preamble).is_err()
                    || outbound.write_all(&preamble).is_err()
                {
                    continue;
                }
                let kind =
                    if preamble[KIND_AT] == KIND_CONTROL { Kind::Control } else { Kind::Lane };
                for (from, to) in [(&inbound, &outbound), (&outbound, &inbound)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let shared = Arc::clone(&shared);
                    std::thread::spawn(move || forward(from, to, kind, &shared));
                }
                shared.connections.lock().unwrap().push((kind, inbound, outbound));
            }
        });
        Self { addr, state }
    }

    pub const fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Cuts every connection of a kind. New ones are forwarded again.
    pub fn cut(&self, kind: Kind) {
        self.state.connections.lock().unwrap().retain(|(of, inbound, outbound)| {
            if *of == kind {
                let _ = inbound.shutdown(Shutdown::Both);
                let _ = outbound.shutdown(Shutdown::Both);
            }
            *of != kind
        });
    }

    /// Cuts the oldest connection of a kind.
    pub fn cut_one(&self, kind: Kind) {
        let mut connections = self.state.connections.lock().unwrap();
        if let Some(at) = connections.iter().position(|(of, _, _)| *of == kind) {
            let (_, inbound, outbound) = connections.remove(at);
            let _ = inbound.shutdown(Shutdown::Both);
            let _ = outbound.shutdown(Shutdown::Both);
        }
    }

    /// From now on forwards nothing, and keeps every connection open.
    pub fn stall(&self) {
        self.stall_only(Kind::Control);
        self.stall_only(Kind::Lane);
    }

    /// From now on forwards nothing of a kind, and keeps its connections open.
    pub fn stall_only(&self, kind: Kind) {
        self.state.stalled[kind as usize].store(true, Ordering::SeqCst);
    }

    /// Forwards everything again, and first what was held back.
    pub fn resume(&self) {
        self.resume_only(Kind::Control);
        self.resume_only(Kind::Lane);
    }

    /// As [`Proxy::resume`], of a kind.
    pub fn resume_only(&self, kind: Kind) {
        self.state.stalled[kind as usize].store(false, Ordering::SeqCst);
    }

    /// From now on closes new connections at once.
    pub fn refuse(&self) {
        self.state.refusing.store(true, Ordering::SeqCst);
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, kind: Kind, state: &State) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(bytes) = from.read(&mut buffer) {
        while state.stalled[kind as usize].load(Ordering::SeqCst) {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        if bytes == 0 || to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
