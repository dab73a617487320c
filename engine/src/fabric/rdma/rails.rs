//! An engine's rails: NIC ports that were opened, and the memory registered with them. Shared by the
//! control plane, which makes queue pairs, and the worker, which owns them afterwards.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kvferry_verbs::{
    Access, AsyncEvent, CompletionChannel, Context, Cq, DeviceAttributes, GidType, Library,
    LinkLayer, Mr, Pd, PortState, Srq, SrqOptions, VerbsError, rank_gids,
};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::keys::{KeyTable, Keyed};
use super::lane::{RECEIVES_PER_LANE, SQ_WRS};
use crate::config::RdmaConfig;
use crate::memory::{PageMap, Region};
use crate::wire::rails::{
    GIDS_MAX, GidCard, GidKind, KEYS_MAX, PoolMemory, RAILS_MAX, RailCard, RailsCard, RegionKeys,
};

/// Lanes that a NIC has room for, where its limits allow it.
const LANES_PER_NIC: u32 = 128;
/// Largest header that is sent from inside a work request.
pub(super) const INLINE_BYTES: u32 = 64;
/// Bytes of one posted receive: a frame header.
pub(super) const RECEIVE_BYTES: usize = crate::wire::frame::HEADER_BYTES;

/// RDMA cannot be used here.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RdmaError {
    /// No library, or no devices.
    #[error(transparent)]
    Library(#[from] kvferry_verbs::LibraryError),
    /// A rail that was asked for does not exist.
    #[error("there is no rail {name}; this host has {have}")]
    NoSuchRail {
        /// As configured.
        name: String,
        /// What there is.
        have: String,
    },
    /// A rail that was asked for is not up.
    #[error("rail {name} is {state}; check its cable and switch port, or leave it out")]
    RailDown {
        /// Its name.
        name: String,
        /// State of its port.
        state: String,
    },
    /// No port is up.
    #[error("no RDMA port is up on this host; check the cables, or the state of {devices}")]
    NoRailUp {
        /// Devices that were looked at.
        devices: String,
    },
    /// A rail has no GID that others could reach it by.
    #[error("rail {name} has no usable GID: {why}")]
    NoGid {
        /// Its name.
        name: String,
        /// What was found.
        why: String,
    },
    /// More rails than an engine uses.
    #[error("{0} RDMA ports are up, an engine uses at most 16; name those it shall use")]
    TooManyRails(usize),
    /// The pools are in more pieces than a peer can be told.
    #[error("the pools are in {0} pieces of memory, at most 65536 can be registered")]
    TooManyRegions(usize),
    /// Pools name memory that overlaps in part.
    #[error("two regions of the pools overlap in part; name each stretch of memory once")]
    Overlap,
    /// The operating system refused a file descriptor.
    #[error("the operating system refused: {0}")]
    Os(#[source] std::io::Error),
    /// A NIC refused.
    #[error("{device}: {source}")]
    Nic {
        /// Its name.
        device: String,
        /// What it said.
        #[source]
        source: VerbsError,
    },
}

impl RdmaError {
    /// Whether the host has no RDMA at all, rather than one that does not work.
    pub(crate) const fn is_absence(&self) -> bool {
        use kvferry_verbs::LibraryError as Library;
        matches!(
            self,
            Self::Library(
                Library::NoLibrary { .. } | Library::NoKernelSupport | Library::NoDevices
            )
        )
    }
}

/// A NIC that was opened.
#[derive(Debug)]
pub(super) struct Nic {
    pub(super) context: Context,
    pub(super) pd: Pd,
    pub(super) cq: Cq,
    pub(super) srq: Srq,
    pub(super) channel: CompletionChannel,
    pub(super) limits: DeviceAttributes,
    /// Receives that the shared queue takes.
    pub(super) receives: u32,
    /// Lanes that still fit into the queues.
    lanes_free: AtomicU32,
    /// Keys of our own memory.
    pub(super) local: Arc<KeyTable>,
}

/// One port of a NIC.
#[derive(Debug)]
pub(super) struct Rail {
    pub(super) name: String,
    pub(super) nic: usize,
    pub(super) port: u8,
    up: AtomicBool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Rails {
    pub(super) nics: Vec<Nic>,
    pub(super) rails: Vec<Rail>,
    pub(super) config: RdmaConfig,
    card: RailsCard,
    memory: Mutex<Vec<Registered>>,
}

/// A region and its registrations. The memory is let go only after every NIC has.
#[derive(Debug)]
struct Registered {
    region: Region,
    mrs: Vec<Mr>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.mrs.iter().for_each(Mr::revoke);
    }
}

/// A place among the lanes of a NIC, given back when the lane is gone.
#[derive(Debug)]
pub(super) struct Place {
    rails: Arc<Rails>,
    nic: usize,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.rails.nics[self.nic].lanes_free.fetch_add(1, Ordering::Relaxed);
    }
}

/// What became of a rail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RailNews {
    Down { rail: u8, cause: String },
    Up { rail: u8 },
}

/// What a NIC tells of its ports.
#[derive(Debug)]
pub(crate) struct RailEvents {
    rails: Arc<Rails>,
    nic: usize,
    fd: AsyncFd<OwnedFd>,
}

impl RailEvents {
    /// Waits for news; what there is may concern no rail.
    ///
    /// # Errors
    /// The runtime is going away.
    pub(crate) async fn next(&mut self) -> std::io::Result<Vec<RailNews>> {
        let mut ready = self.fd.readable().await?;
        let news = self.rails.news(self.nic);
        ready.clear_ready();
        Ok(news)
    }
}

impl Rails {
    /// Opens the rails that are configured, or all that are up, and registers the pools' memory with them.
    ///
    /// # Errors
    /// [`RdmaError`]: the first thing that is in the way.
    pub(crate) fn open(
        config: &RdmaConfig,
        pools: &[Arc<PageMap>],
        first_layers: &[u32],
    ) -> Result<Arc<Self>, RdmaError> {
        let library = match &config.library {
            Some(library) => library.clone(),
            None => Library::open()?,
        };
        let library = &library;
        let found = find_rails(library, config)?;
        let mut devices: Vec<&str> = Vec::new();
        for (device, _) in &found {
            if !devices.contains(&device.as_str()) {
                devices.push(device);
            }
        }
        let mut nics: Vec<Nic> =
            devices.iter().map(|device| open_nic(library, device)).collect::<Result<_, _>>()?;
        let mut rails = Vec::new();
        let mut cards = Vec::new();
        for (device, port) in &found {
            let nic = devices.iter().position(|known| known == device).unwrap_or(0);
            let card = rail_card(&nics[nic].context, device, *port, nic, config)?;
            let name = card.name.clone();
            rails.push(Rail { name, nic, port: *port, up: AtomicBool::new(true) });
            cards.push(card);
        }
        let (memory, keys) = register(&mut nics, pools, config.relaxed_ordering)?;
        let pools = pools
            .iter()
            .zip(first_layers)
            .map(|(map, &first_layer)| PoolMemory {
                first_layer,
                layers: map.layers(),
                arrays: map.arrays().to_vec(),
            })
            .collect();
        let card = RailsCard { rails: cards, pools, keys };
        let memory = Mutex::new(memory);
        Ok(Arc::new(Self { nics, rails, config: config.clone(), card, memory }))
    }

    /// What a peer is told.
    pub(crate) fn card(&self) -> RailsCard {
        self.card.clone()
    }

    pub(crate) fn rail_cards(&self) -> &[RailCard] {
        &self.card.rails
    }

    pub(crate) fn is_up(&self, rail: u8) -> bool {
        self.rails.get(usize::from(rail)).is_some_and(|rail| rail.up.load(Ordering::Relaxed))
    }

    /// What NICs tell of their ports, one stream a NIC. To be called inside a runtime.
    ///
    /// # Errors
    /// The operating system refuses a file descriptor.
    pub(crate) fn events(self: &Arc<Self>) -> std::io::Result<Vec<RailEvents>> {
        let of_nic = |(nic, at): (usize, &Nic)| {
            let fd = at.context.async_fd().try_clone_to_owned()?;
            // SAFETY: the file descriptor is a duplicate of its own that stays open, and the same, until
            // `AsyncFd` drops it.
            let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
            Ok(RailEvents { rails: Arc::clone(self), nic, fd })
        };
        self.nics.iter().enumerate().map(of_nic).collect()
    }

    /// What a NIC has to say, without waiting. Lane-level events say nothing that completions do not.
    fn news(&self, nic: usize) -> Vec<RailNews> {
        let mut news = Vec::new();
        let Some(of) = self.nics.get(nic) else { return news };
        while let Ok(Some(event)) = of.context.next_async_event() {
            let (port, cause) = match event {
                AsyncEvent::PortError { port } => (Some(port), Some("its port went down")),
                AsyncEvent::PortActive { port } => (Some(port), None),
                AsyncEvent::DeviceFatal => (None, Some("the device failed")),
                // An address that was added or taken away is no fault of the rail. Lanes that need one
                // that is gone fail by themselves, and the next pair of GIDs is offered.
                _ => continue,
            };
            for (rail, of_rail) in self.rails.iter().enumerate() {
                if of_rail.nic != nic || port.is_some_and(|port| port != of_rail.port) {
                    continue;
                }
                of_rail.up.store(cause.is_none(), Ordering::Relaxed);
                let rail = rail as u8;
                news.push(match cause {
                    Some(cause) => {
                        RailNews::Down { rail, cause: format!("{}: {cause}", of_rail.name) }
                    }
                    None => RailNews::Up { rail },
                });
            }
        }
        news
    }

    /// Takes a place for a lane on a NIC.
    pub(super) fn place(self: &Arc<Self>, nic: usize) -> Option<Place> {
        let free = &self.nics[nic].lanes_free;
        let taken =
            free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| free.checked_sub(1));
        taken.ok().map(|_| Place { rails: Arc::clone(self), nic })
    }

    /// Lets go of a pool's memory that no other pool is in. What a peer writes there from now on its NIC is
    /// refused.
    pub(super) fn forget(&self, map: &PageMap, others: &[&PageMap]) {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.retain(|held| {
            let is_in = |map: &PageMap| map.regions().iter().any(|region| region.is(&held.region));
            !is_in(map) || others.iter().any(|other| is_in(other))
        });
    }
}

/// Devices and ports, in the order they are to be used.
fn find_rails(library: &Library, config: &RdmaConfig) -> Result<Vec<(String, u8)>, RdmaError> {
    let devices = library.devices()?;
    let port_state = |device: &str, port: u8| -> Result<PortState, RdmaError> {
        let context = Context::open(library, device).map_err(|source| nic_error(device, source))?;
        Ok(context.port(port).map_err(|source| nic_error(device, source))?.state)
    };
    if !config.rails.is_empty() {
        let mut rails = Vec::new();
        for name in &config.rails {
            let (device, port) = match name.rsplit_once(':') {
                Some((device, port)) => (device, port.parse::<u8>().ok()),
                None => (name.as_str(), Some(1)),
            };
            let known = devices.iter().any(|known| known == device);
            let Some(port) = port.filter(|&port| known && port > 0) else {
                let have = devices.join(", ");
                return Err(RdmaError::NoSuchRail { name: name.clone(), have });
            };
            match port_state(device, port)? {
                PortState::Active => {}
                state => {
                    let (name, state) = (name.clone(), format!("{state:?}"));
                    return Err(RdmaError::RailDown { name, state });
                }
            }
            let rail = (device.to_owned(), port);
            if !rails.contains(&rail) {
                rails.push(rail);
            }
        }
        return Ok(rails);
    }
    let mut rails = Vec::new();
    for device in &devices {
        let context = Context::open(library, device).map_err(|source| nic_error(device, source))?;
        let ports = context.attributes().map_err(|source| nic_error(device, source))?.ports;
        for port in 1..=ports {
            let up = context.port(port).is_ok_and(|port| port.state == PortState::Active);
            if up {
                rails.push((device.clone(), port));
            }
        }
    }
    match rails.len() {
        0 => Err(RdmaError::NoRailUp { devices: devices.join(", ") }),
        count if count > RAILS_MAX => Err(RdmaError::TooManyRails(count)),
        _ => Ok(rails),
    }
}

pub(super) fn nic_error(device: &str, source: VerbsError) -> RdmaError {
    RdmaError::Nic { device: device.to_owned(), source }
}

fn open_nic(library: &Library, device: &str) -> Result<Nic, RdmaError> {
    let open = || -> Result<Nic, VerbsError> {
        let context = Context::open(library, device)?;
        let limits = context.attributes()?;
        // Every receive can complete, and every work request of every lane be flushed, without the
        // completion queue overflowing.
        let per_lane = RECEIVES_PER_LANE + SQ_WRS;
        let lanes = (limits.max_cqe / per_lane)
            .min(limits.max_srq_wr / RECEIVES_PER_LANE)
            .clamp(1, LANES_PER_NIC);
        let channel = context.completion_channel()?;
        let cq = context.create_cq(lanes * per_lane, Some(&channel))?;
        let pd = context.allocate_pd()?;
        let receives = lanes * RECEIVES_PER_LANE;
        let srq = pd.create_srq(SrqOptions { max_wr: receives, max_sge: 1 })?;
        Ok(Nic {
            context,
            pd,
            cq,
            srq,
            channel,
            limits,
            receives,
            lanes_free: AtomicU32::new(lanes),
            local: Arc::default(),
        })
    };
    open().map_err(|source| nic_error(device, source))
}

fn rail_card(
    context: &Context,
    device: &str,
    port: u8,
    nic: usize,
    config: &RdmaConfig,
) -> Result<RailCard, RdmaError> {
    let name = format!("{device}:{port}");
    let attributes = context.port(port).map_err(|source| nic_error(device, source))?;
    let table = context.gid_table(port).map_err(|source| nic_error(device, source))?;
    let ranked: Vec<_> = match config.gid_index {
        Some(index) => table.iter().filter(|entry| entry.index == index).collect(),
        None => rank_gids(&table),
    };
    let gids: Vec<GidCard> = ranked
        .into_iter()
        .take(GIDS_MAX)
        .map(|entry| GidCard {
            gid: entry.gid.0.octets(),
            index: entry.index,
            kind: match entry.kind {
                GidType::InfiniBand => GidKind::InfiniBand,
                GidType::RoceV1 => GidKind::RoceV1,
                _ => GidKind::RoceV2,
            },
        })
        .collect();
    if gids.is_empty() {
        let why = match config.gid_index {
            Some(index) => format!("its table has none at index {index}; choose another one"),
            None => "give its network interface an address".to_owned(),
        };
        return Err(RdmaError::NoGid { name, why });
    }
    Ok(RailCard {
        name,
        nic: nic as u8,
        infiniband: attributes.link_layer == LinkLayer::InfiniBand,
        lid: attributes.lid,
        gids,
        rate_mbit_s: attributes.rate_mbit_s,
    })
}

/// Registers every region of the pools with every NIC, in pieces where it is larger than a NIC takes.
fn register(
    nics: &mut [Nic],
    pools: &[Arc<PageMap>],
    relaxed_ordering: bool,
) -> Result<(Vec<Registered>, Vec<RegionKeys>), RdmaError> {
    let mut regions: Vec<Region> = Vec::new();
    for region in pools.iter().flat_map(|map| map.regions()) {
        if !region.is_empty() && !regions.iter().any(|known| known.is(region)) {
            regions.push(region.clone());
        }
    }
    regions.sort_by_key(|region| region.as_ptr() as u64);
    let overlap =
        |pair: &[Region]| pair[0].as_ptr() as u64 + pair[0].len() as u64 > pair[1].as_ptr() as u64;
    if regions.windows(2).any(overlap) {
        return Err(RdmaError::Overlap);
    }
    let mut access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    if relaxed_ordering {
        access |= Access::RELAXED_ORDERING;
    }
    // Cut alike for all NICs, so that a piece has one key of each.
    let piece_bytes = nics.iter().map(|nic| nic.limits.max_mr_size).min().unwrap_or(u64::MAX);
    let (mut memory, mut keys) = (Vec::new(), Vec::<RegionKeys>::new());
    let mut local: Vec<Vec<Keyed>> = vec![Vec::new(); nics.len()];
    for region in regions {
        let mut held = Registered { region, mrs: Vec::new() };
        let first = keys.len();
        for (at, nic) in nics.iter().enumerate() {
            let (addr, bytes) = (held.region.as_ptr(), held.region.len());
            // SAFETY: the region keeps the memory mapped, and `Registered` keeps the region until the
            // registrations are revoked. What the NIC may touch is what the engine may: granted pages,
            // and pages being written.
            let mrs = unsafe { nic.pd.register_raw_chunked(addr, bytes, access, piece_bytes) };
            let mrs = mrs.map_err(|source| nic_error(nic.context.name(), source))?;
            for (piece, mr) in mrs.iter().enumerate() {
                let (addr, bytes) = (mr.addr(), mr.bytes());
                if at == 0 {
                    keys.push(RegionKeys { addr, bytes, rkeys: Vec::new() });
                }
                keys[first + piece].rkeys.push(mr.rkey());
                local[at].push(Keyed { addr, end: addr + bytes, key: mr.lkey() });
            }
            held.mrs.extend(mrs);
        }
        memory.push(held);
    }
    if keys.len() > KEYS_MAX {
        return Err(RdmaError::TooManyRegions(keys.len()));
    }
    for (nic, table) in nics.iter_mut().zip(local) {
        nic.local = Arc::new(KeyTable::new(table));
    }
    Ok((memory, keys))
}
