//! What a measured room looks like: pages scattered over both pools, so that none can be merged.

use std::time::Duration;

use clap::{Args, ValueEnum};
use kvferry::{
    AllocOptions, Engine, EngineConfig, IoMode, PageArray, Pool, PoolLayout, Region, ZeroCopy,
};

/// Shape of the rooms and of the engines; both processes are given the same.
#[derive(Args, Clone, Debug)]
pub(crate) struct Shape {
    /// Bytes of a page.
    #[arg(long, default_value_t = 65536)]
    pub(crate) page_bytes: u32,
    /// Pages of a room.
    #[arg(long, default_value_t = 1024)]
    pub(crate) pages: u32,
    /// Lanes between the two engines.
    #[arg(long, default_value_t = 2)]
    pub(crate) lanes: u16,
    /// How an idle worker polls before it sleeps, in microseconds.
    #[arg(long, default_value_t = 50)]
    pub(crate) spin_us: u64,
    /// How lanes are driven.
    #[arg(long, value_enum, default_value_t = Io::Auto)]
    pub(crate) io: Io,
    /// When to ask the kernel for zero-copy sends.
    #[arg(long, value_enum, default_value_t = Zc::Auto)]
    pub(crate) zero_copy: Zc,
    /// Let the engine allocate the pool (memfd) instead of handing it memory of the process.
    #[arg(long)]
    pub(crate) memfd: bool,
    /// Pin the sending worker to the first CPU and the receiving one to the last.
    #[arg(long)]
    pub(crate) pin: bool,
}

#[derive(ValueEnum, Clone, Copy, Debug)]
pub(crate) enum Io {
    Auto,
    #[value(name = "io-uring")]
    Uring,
    Epoll,
}

#[derive(ValueEnum, Clone, Copy, Debug)]
pub(crate) enum Zc {
    Auto,
    Off,
    Try,
}

impl Shape {
    pub(crate) fn room_bytes(&self) -> u64 {
        u64::from(self.page_bytes) * u64::from(self.pages)
    }

    /// The arguments that give another process this shape.
    pub(crate) fn to_args(&self) -> Vec<String> {
        let io = match self.io {
            Io::Auto => "auto",
            Io::Uring => "io-uring",
            Io::Epoll => "epoll",
        };
        let zero_copy = match self.zero_copy {
            Zc::Auto => "auto",
            Zc::Off => "off",
            Zc::Try => "try",
        };
        let mut args: Vec<String> = [
            ("--page-bytes", self.page_bytes.to_string()),
            ("--pages", self.pages.to_string()),
            ("--lanes", self.lanes.to_string()),
            ("--spin-us", self.spin_us.to_string()),
            ("--io", io.to_owned()),
            ("--zero-copy", zero_copy.to_owned()),
        ]
        .into_iter()
        .flat_map(|(flag, value)| [flag.to_owned(), value])
        .collect();
        if self.pin {
            args.push("--pin".to_owned());
        }
        if self.memfd {
            args.push("--memfd".to_owned());
        }
        args
    }

    /// An engine of this shape, its pool twice as large as a room and written once.
    pub(crate) fn engine(
        &self,
        config: EngineConfig,
        last_cpu: bool,
    ) -> anyhow::Result<(Engine, Pool)> {
        let layout = PoolLayout::opaque("kv", 0..1, self.pages * 2, self.page_bytes);
        let pool = if self.memfd {
            Pool::allocate(layout, AllocOptions { huge_pages: false })?
        } else {
            // As an inference engine would have it, and as the yardstick has it.
            let bytes = u64::from(self.pages) * 2 * u64::from(self.page_bytes);
            let region = Region::from_vec(vec![1; usize::try_from(bytes)?]);
            let stride = u64::from(self.page_bytes);
            Pool::new(layout, vec![PageArray { region, offset: 0, stride }])?
        };
        for page in 0..self.pages * 2 {
            if let Some((region, offset)) = pool.locate(0, 0, page) {
                region.write_at(offset, &vec![page as u8 | 1; self.page_bytes as usize])?;
            }
        }
        let cpus = std::thread::available_parallelism()?.get();
        let cpu = self.pin.then_some(if last_cpu { cpus - 1 } else { 0 });
        let config = config
            .io(match self.io {
                Io::Auto => IoMode::Auto,
                Io::Uring => IoMode::RequireIoUring,
                Io::Epoll => IoMode::Epoll,
            })
            .zero_copy(match self.zero_copy {
                Zc::Auto => ZeroCopy::Auto,
                Zc::Off => ZeroCopy::Off,
                Zc::Try => ZeroCopy::Try,
            })
            .lanes(self.lanes)
            .spin_us(self.spin_us)
            .worker_cpu(cpu);
        let mut builder = Engine::builder(config);
        builder.pool(pool.clone())?;
        Ok((builder.start()?, pool))
    }

    /// Source pages: the even ones, shuffled.
    pub(crate) fn sources(&self) -> Vec<u32> {
        shuffled(self.pages, 0, 88_172_645_463_325_252)
    }

    /// Destination pages: the odd ones, shuffled otherwise.
    pub(crate) fn targets(&self) -> Vec<u32> {
        shuffled(self.pages, 1, 1_442_695_040_888_963_407)
    }
}

fn shuffled(pages: u32, odd: u32, mut seed: u64) -> Vec<u32> {
    let mut list: Vec<u32> = (0..pages).map(|page| 2 * page + odd).collect();
    for i in (1..list.len()).rev() {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        list.swap(i, (seed % (i as u64 + 1)) as usize);
    }
    list
}

/// Microseconds of the clock that all processes of a host share.
pub(crate) fn now_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(Duration::new(now.tv_sec.cast_unsigned(), now.tv_nsec as u32).as_micros())
        .unwrap_or(u64::MAX)
}
