//! A TCP proxy that reads what it forwards, message by message and frame by frame, and may change,
//! drop, spoil or hold it, cut the connection, or lead to another engine.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Magic, kind and version, from either end.
const PREAMBLE_BYTES: usize = 7;
const KIND_AT: usize = 4;
const KIND_CONTROL: u8 = 1;
const TOKEN_BYTES: usize = 32;
/// Hello and proof from the dialer, answer and welcome from the listener.
const GREETINGS: usize = 2;
const STEP_BYTES: usize = 64 << 10;

/// Which end something is on its way to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum To {
    Listener,
    Dialer,
}

/// What becomes of a message or a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Do {
    Forward,
    /// It never arrives; what follows does. For messages only: a lane notices a frame that is missing.
    Drop,
    /// A bit of a frame's payload is turned over.
    Spoil,
    /// The connection is cut instead.
    Cut,
}

/// Body of a control message: postcard, so it begins with the number of its variant.
pub type Body = Vec<u8>;

/// Numbers of the control messages.
pub const GRANT: u8 = 0;
pub const FINISHED: u8 = 1;
pub const LANDED: u8 = 2;
pub const FAILED: u8 = 3;
pub const LANE_TALLY: u8 = 6;

/// Changes the first fields of a message; those behind them stay as they are.
pub fn rewrite<T: Serialize + DeserializeOwned>(body: &mut Body, change: impl FnOnce(&mut T)) {
    let (mut first, rest) = postcard::take_from_bytes::<T>(body).unwrap();
    change(&mut first);
    *body = [postcard::to_stdvec(&first).unwrap(), rest.to_vec()].concat();
}

/// Header of a lane's frame.
pub type Header = [u8; 64];

/// Where fields stand in the header of a data frame.
pub mod at {
    pub const POOL: usize = 3;
    pub const LAYER: usize = 24;
    pub const POSITION: usize = 28;
    pub const PIECES: usize = 40;
    pub const PAYLOAD_BYTES: usize = 44;
    pub(super) const CHECKSUM: usize = 60;
}

pub fn is_data(header: &Header) -> bool {
    header[2] == 1
}

pub fn get(header: &Header, at: usize) -> u32 {
    u32::from_le_bytes(header[at..at + 4].try_into().unwrap())
}

/// Puts bytes in a header and its checksum right.
pub fn put(header: &mut Header, at: usize, bytes: &[u8]) {
    header[at..at + bytes.len()].copy_from_slice(bytes);
    let checksum = crc32c::crc32c(&header[..at::CHECKSUM]);
    header[at::CHECKSUM..].copy_from_slice(&checksum.to_le_bytes());
}

type OnMessage = Arc<dyn Fn(To, &mut Body) -> Do + Send + Sync>;
type OnFrame = Arc<dyn Fn(To, &mut Header) -> Do + Send + Sync>;

/// Two sockets, and whether they carry control messages.
type Connection = (bool, TcpStream, TcpStream);

struct Shared {
    target: Mutex<SocketAddr>,
    refusing: AtomicBool,
    message: Mutex<OnMessage>,
    frame: Mutex<OnFrame>,
    connections: Mutex<Vec<Connection>>,
}

/// See the module.
pub struct Tamper {
    addr: SocketAddr,
    shared: Arc<Shared>,
}

impl Tamper {
    /// Forwards to an address, honestly until told otherwise.
    pub fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            target: Mutex::new(target),
            refusing: AtomicBool::new(false),
            message: Mutex::new(Arc::new(|_, _| Do::Forward)),
            frame: Mutex::new(Arc::new(|_, _| Do::Forward)),
            connections: Mutex::default(),
        });
        let accepting = Arc::clone(&shared);
        std::thread::spawn(move || {
            for inbound in listener.incoming().flatten() {
                if !accepting.refusing.load(Ordering::SeqCst) {
                    let shared = Arc::clone(&accepting);
                    std::thread::spawn(move || shared.connect(inbound));
                }
            }
        });
        Self { addr, shared }
    }

    pub const fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// New connections go to another engine.
    pub fn lead_to(&self, target: SocketAddr) {
        *self.shared.target.lock().unwrap() = target;
    }

    /// What becomes of control messages. May block: what is behind waits.
    pub fn messages(&self, on: impl Fn(To, &mut Body) -> Do + Send + Sync + 'static) {
        *self.shared.message.lock().unwrap() = Arc::new(on);
    }

    /// What becomes of frames. May block: the lane waits, and nothing is read from it.
    pub fn frames(&self, on: impl Fn(To, &mut Header) -> Do + Send + Sync + 'static) {
        *self.shared.frame.lock().unwrap() = Arc::new(on);
    }

    /// Forwards everything as it is.
    pub fn be_honest(&self) {
        self.messages(|_, _| Do::Forward);
        self.frames(|_, _| Do::Forward);
    }

    /// Cuts the control connection. Lanes stay.
    pub fn cut_control(&self) {
        self.cut(|control| control);
    }

    pub fn cut_everything(&self) {
        self.cut(|_| true);
    }

    fn cut(&self, which: impl Fn(bool) -> bool) {
        self.shared.connections.lock().unwrap().retain(|(control, inbound, outbound)| {
            if which(*control) {
                let _ = inbound.shutdown(Shutdown::Both);
                let _ = outbound.shutdown(Shutdown::Both);
            }
            !which(*control)
        });
    }

    /// Whether new connections are closed at once.
    pub fn refuse(&self, refusing: bool) {
        self.shared.refusing.store(refusing, Ordering::SeqCst);
    }
}

impl Shared {
    fn connect(self: Arc<Self>, mut inbound: TcpStream) {
        let target = *self.target.lock().unwrap();
        let mut preamble = [0; PREAMBLE_BYTES];
        let Ok(mut outbound) = TcpStream::connect(target) else { return };
        let passed = inbound.read_exact(&mut preamble).and_then(|()| outbound.write_all(&preamble));
        if passed.is_err() {
            return;
        }
        let _ = (inbound.set_nodelay(true), outbound.set_nodelay(true));
        let control = preamble[KIND_AT] == KIND_CONTROL;
        for (from, to, way) in
            [(&inbound, &outbound, To::Listener), (&outbound, &inbound, To::Dialer)]
        {
            let mut pipe = Pipe {
                from: from.try_clone().unwrap(),
                to: to.try_clone().unwrap(),
                way,
                shared: Arc::clone(&self),
            };
            std::thread::spawn(move || {
                let ended = if control { pipe.control() } else { pipe.lane() };
                // An end of one direction is passed on as that: what goes the other way still arrives.
                let how = match ended {
                    Err(error) if error.kind() == ErrorKind::UnexpectedEof => Shutdown::Write,
                    _ => Shutdown::Both,
                };
                let _ = pipe.to.shutdown(how);
                let _ = how == Shutdown::Both && pipe.from.shutdown(how).is_ok();
            });
        }
        self.connections.lock().unwrap().push((control, inbound, outbound));
    }
}

/// One direction of a connection, until either end closes or it is cut.
struct Pipe {
    from: TcpStream,
    to: TcpStream,
    way: To,
    shared: Arc<Shared>,
}

impl Pipe {
    /// The preamble that the listener answers with; the dialer's has been forwarded.
    fn preamble(&mut self) -> std::io::Result<()> {
        if self.way == To::Dialer { self.pass(PREAMBLE_BYTES) } else { Ok(()) }
    }

    fn pass(&mut self, mut bytes: usize) -> std::io::Result<()> {
        let mut buffer = vec![0; bytes.min(STEP_BYTES)];
        while bytes > 0 {
            let step = bytes.min(STEP_BYTES);
            self.from.read_exact(&mut buffer[..step])?;
            self.to.write_all(&buffer[..step])?;
            bytes -= step;
        }
        Ok(())
    }

    fn control(&mut self) -> std::io::Result<()> {
        self.preamble()?;
        for number in 0.. {
            let mut length = [0; 4];
            self.from.read_exact(&mut length)?;
            let mut body = vec![0; u32::from_le_bytes(length) as usize];
            self.from.read_exact(&mut body)?;
            let on = Arc::clone(&self.shared.message.lock().unwrap());
            match if number < GREETINGS { Do::Forward } else { on(self.way, &mut body) } {
                Do::Forward => {
                    let length = (body.len() as u32).to_le_bytes();
                    self.to.write_all(&[&length[..], &body].concat())?;
                }
                Do::Drop => {}
                Do::Spoil => unreachable!("messages are rewritten, not spoiled"),
                Do::Cut => return Ok(()),
            }
        }
        Ok(())
    }

    fn lane(&mut self) -> std::io::Result<()> {
        self.preamble()?;
        self.pass(if self.way == To::Listener { TOKEN_BYTES } else { 1 })?;
        loop {
            let mut header = [0; 64];
            self.from.read_exact(&mut header)?;
            let payload = |header: &Header| match is_data(header) {
                true => get(header, at::PAYLOAD_BYTES) as usize,
                false => 0,
            };
            let had = payload(&header);
            let on = Arc::clone(&self.shared.frame.lock().unwrap());
            let what = on(self.way, &mut header);
            if what == Do::Cut {
                return Ok(());
            }
            assert_ne!(what, Do::Drop, "a lane notices a frame that is missing");
            self.to.write_all(&header)?;
            // As many bytes as the header now says, so that the lane stays in step.
            let kept = had.min(payload(&header));
            if what == Do::Spoil && kept > 0 {
                let mut byte = [0];
                self.from.read_exact(&mut byte)?;
                self.to.write_all(&[byte[0] ^ 1])?;
                self.pass(kept - 1)?;
            } else {
                self.pass(kept)?;
            }
            self.from.read_exact(&mut vec![0; had - kept])?;
        }
    }
}

/// Something to wait at.
#[derive(Clone)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub fn closed() -> Self {
        Self(Arc::new((Mutex::new(true), Condvar::new())))
    }

    pub fn open(&self) {
        *self.0.0.lock().unwrap() = false;
        self.0.1.notify_all();
    }

    /// Waits until the gate is open.
    pub fn pass(&self) {
        let closed = self.0.0.lock().unwrap();
        drop(self.0.1.wait_while(closed, |closed| *closed).unwrap());
    }
}
