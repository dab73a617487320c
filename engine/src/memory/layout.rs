//! How KV pages lie, and what part of them two engines have in common.
//!
//! Two engines may hold different layers (pipeline parallel) and different heads (tensor parallel) of
//! one model. Everything else must match, and a mismatch is named when they meet, not when pages
//! arrive.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{LAYERS_MAX, PAGE_BYTES_MAX, POOL_NAME_BYTES_MAX};

/// Element type of a pool. The engine moves bytes; the type is there to be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names are the types' own")]
pub enum Dtype {
    F32,
    F16,
    Bf16,
    Fp8E4m3,
    Fp8E5m2,
    Int8,
    Fp4,
    /// Opaque bytes: recurrent state, scales, anything that is not K/V.
    Bytes,
}

/// K and V as two planes, or one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Planes {
    /// Separate K and V pages (multi-head, grouped-query attention).
    KeyValue,
    /// One page a layer: a compressed latent (MLA), or opaque state.
    One,
}

impl Planes {
    /// How many planes.
    #[must_use]
    pub const fn count(self) -> u32 {
        match self {
            Self::KeyValue => 2,
            Self::One => 1,
        }
    }
}

/// Order of tokens and heads inside a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HeadOrder {
    /// `[token][head][dim]` (NHD): a head slice is one strip a token.
    TokenMajor,
    /// `[head][token][dim]` (HND): a head slice is one contiguous strip.
    HeadMajor,
}

/// How the pages of one pool lie: layers × planes × pages × page bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolLayout {
    /// Which pool of the model this is (`kv`, `draft`, `mamba`…). Peers pair pools by name.
    pub name: String,
    /// The model's layers held here, by their number in the model.
    pub layers: Range<u32>,
    /// K and V, or one plane.
    pub planes: Planes,
    /// Pages in each (layer, plane). May differ between peers.
    pub pages: u32,
    /// Tokens in a page.
    pub page_tokens: u32,
    /// Element type.
    pub dtype: Dtype,
    /// KV heads of the whole model; 1 where pages are not split by head.
    pub total_heads: u32,
    /// The model's KV heads held here, by their number in the model.
    pub heads: Range<u32>,
    /// Bytes of one token of one head: head dimension × element size.
    pub head_bytes: u32,
    /// Order inside a page.
    pub order: HeadOrder,
}

/// A layout that describes no pool.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A field's value is out of its range.
    #[error("pool {pool:?}: {field} is {value}, it must be {want}")]
    Field {
        /// Pool name, as given.
        pool: String,
        /// Field of [`PoolLayout`].
        field: &'static str,
        /// What it was.
        value: String,
        /// What would do.
        want: String,
    },
    /// The list of page arrays does not have one for each (plane, layer).
    #[error(
        "pool {pool:?}: {given} page arrays given, {want} needed: all K layers, then all V layers"
    )]
    Arrays {
        /// Pool name.
        pool: String,
        /// Arrays given.
        given: usize,
        /// Arrays needed.
        want: usize,
    },
    /// A page array does not lie in its region.
    #[error("pool {pool:?}: page array {array} needs bytes {offset}..{end} of a region of {bytes}")]
    OutsideRegion {
        /// Pool name.
        pool: String,
        /// Index of the array.
        array: usize,
        /// First byte.
        offset: u64,
        /// Past the last byte.
        end: u64,
        /// Bytes the region has.
        bytes: u64,
    },
    /// More pools than an engine takes, or two of one name.
    #[error("pool {pool:?} cannot be added: {why}")]
    NotAdded {
        /// Pool name.
        pool: String,
        /// Why.
        why: &'static str,
    },
    /// Memory for the pool could not be had.
    #[error(transparent)]
    Alloc(#[from] super::AllocError),
}

/// Two engines' layouts do not fit: the field, and both values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error(
    "layout mismatch in pool {pool:?}: {field} is {ours} here and {theirs} at the peer; start both sides with the same model and page settings"
)]
pub struct LayoutMismatch {
    /// Pool name.
    pub pool: String,
    /// Field that differs.
    pub field: String,
    /// Value on the side that reports.
    pub ours: String,
    /// Value on the other side.
    pub theirs: String,
}

impl PoolLayout {
    /// A pool of opaque pages: recurrent state, block scales.
    #[must_use]
    pub fn opaque(name: &str, layers: Range<u32>, pages: u32, page_bytes: u32) -> Self {
        Self {
            name: name.to_owned(),
            layers,
            planes: Planes::One,
            pages,
            page_tokens: 1,
            dtype: Dtype::Bytes,
            total_heads: 1,
            heads: 0..1,
            head_bytes: page_bytes,
            order: HeadOrder::TokenMajor,
        }
    }

    /// Bytes of one page of one layer and plane.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        u64::from(self.page_tokens)
            * u64::from(self.heads.end.saturating_sub(self.heads.start))
            * u64::from(self.head_bytes)
    }

    /// Layers held.
    #[must_use]
    pub const fn layer_count(&self) -> u32 {
        self.layers.end.saturating_sub(self.layers.start)
    }

    /// Page arrays needed: layers × planes.
    #[must_use]
    pub const fn array_count(&self) -> usize {
        self.layer_count() as usize * self.planes.count() as usize
    }

    /// # Errors
    /// [`LayoutError::Field`] naming the first field that is out of range.
    pub(crate) fn validate(&self) -> Result<(), LayoutError> {
        let wrong = |field, value: String, want: &str| {
            let pool = self.name.chars().take(POOL_NAME_BYTES_MAX).collect();
            Err(LayoutError::Field { pool, field, value, want: want.to_owned() })
        };
        if self.name.is_empty()
            || self.name.len() > POOL_NAME_BYTES_MAX
            || self.name.contains(char::is_control)
        {
            return wrong("name", format!("{} bytes", self.name.len()), "1 to 32 printable bytes");
        }
        if self.layers.is_empty() || self.layers.end > LAYERS_MAX {
            return wrong("layers", format!("{:?}", self.layers), "a non-empty range below 4096");
        }
        if self.heads.is_empty() || self.heads.end > self.total_heads {
            return wrong(
                "heads",
                format!("{:?}", self.heads),
                "a non-empty range within total_heads",
            );
        }
        for (field, value) in [
            ("pages", self.pages),
            ("page_tokens", self.page_tokens),
            ("head_bytes", self.head_bytes),
        ] {
            if value == 0 {
                return wrong(field, "0".to_owned(), "at least 1");
            }
        }
        let whole = (u128::from(self.page_tokens) * u128::from(self.heads.end - self.heads.start))
            .saturating_mul(u128::from(self.head_bytes));
        if whole > u128::from(PAGE_BYTES_MAX) {
            return wrong("page bytes", whole.to_string(), "at most 64 MiB (one layer, one plane)");
        }
        Ok(())
    }

    /// The strips of a page that hold `heads`, which must lie within this layout's.
    pub(crate) fn slice(&self, heads: &Range<u32>) -> PageSlice {
        let head_bytes = u64::from(self.head_bytes);
        let tokens = u64::from(self.page_tokens);
        let held = u64::from(self.heads.end - self.heads.start);
        let first = u64::from(heads.start - self.heads.start);
        let wanted = u64::from(heads.end - heads.start);
        if wanted == held {
            let bytes = tokens * held * head_bytes;
            return PageSlice { offset: 0, row_bytes: bytes, stride: bytes, rows: 1 };
        }
        match self.order {
            HeadOrder::HeadMajor => {
                let bytes = wanted * tokens * head_bytes;
                PageSlice {
                    offset: first * tokens * head_bytes,
                    row_bytes: bytes,
                    stride: bytes,
                    rows: 1,
                }
            }
            HeadOrder::TokenMajor => PageSlice {
                offset: first * head_bytes,
                row_bytes: wanted * head_bytes,
                stride: held * head_bytes,
                rows: self.page_tokens,
            },
        }
    }
}

/// The part of a page that travels: `rows` strips of `row_bytes`, `stride` apart, from `offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageSlice {
    pub(crate) offset: u64,
    pub(crate) row_bytes: u64,
    pub(crate) stride: u64,
    pub(crate) rows: u32,
}

impl PageSlice {
    pub(crate) const fn bytes(&self) -> u64 {
        self.row_bytes * self.rows as u64
    }
}

/// What a peer is told of a pool: its layout, and how far apart its pages lie.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PoolCard {
    pub(crate) layout: PoolLayout,
    /// Bytes from a page to the next in every array, or 0 when the arrays differ: runs are then
    /// never merged across pages.
    pub(crate) page_stride: u64,
}

/// What two engines have in common of one pool, as one of them sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pairing {
    /// Index of the pool in the peer's list.
    pub(crate) remote_pool: u8,
    /// Layers that both hold, by their number in the model. Empty when they share none.
    pub(crate) layers: Range<u32>,
    /// First layer held here.
    pub(crate) first_layer: u32,
    /// Planes of a layer.
    pub(crate) planes: u32,
    /// Heads that both hold, as strips of our pages. Rows are cut alike on both sides or one of the
    /// two is whole.
    pub(crate) local: PageSlice,
    /// The same strips in the peer's pages.
    pub(crate) remote: PageSlice,
    /// The peer's pages a (layer, plane).
    pub(crate) remote_pages: u32,
    /// The peer's [`PoolCard::page_stride`].
    pub(crate) remote_stride: u64,
}

/// Farthest apart that a peer's pages may lie, in bytes: a terabyte, more than any host's pool.
const PAGE_STRIDE_MAX: u64 = 1 << 40;

impl PoolCard {
    /// Checks what a peer says of a pool.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.layout.validate().map_err(|error| error.to_string())?;
        let (stride, page_bytes) = (self.page_stride, self.layout.page_bytes());
        if stride != 0 && !(page_bytes..=PAGE_STRIDE_MAX).contains(&stride) {
            return Err(format!("pages of {page_bytes} bytes cannot lie {stride} bytes apart"));
        }
        Ok(())
    }
}

impl Pairing {
    /// Bytes that one page write moves.
    pub(crate) const fn piece_bytes(&self) -> u64 {
        self.local.bytes()
    }
}

/// Pairs our pools with the peer's, by name, in our order.
pub(crate) fn pair_all(
    ours: &[PoolCard],
    theirs: &[PoolCard],
) -> Result<Vec<Pairing>, LayoutMismatch> {
    let absent = |name: &str, ours: &str, theirs: &str| LayoutMismatch {
        pool: name.to_owned(),
        field: "pool".to_owned(),
        ours: ours.to_owned(),
        theirs: theirs.to_owned(),
    };
    if let Some(extra) = theirs.iter().find(|t| ours.iter().all(|o| o.layout.name != t.layout.name))
    {
        return Err(absent(&extra.layout.name, "absent", "present"));
    }
    ours.iter()
        .map(|our| {
            let found = theirs.iter().position(|their| their.layout.name == our.layout.name);
            let index = found.ok_or_else(|| absent(&our.layout.name, "present", "absent"))?;
            pair(our, &theirs[index], u8::try_from(index).unwrap_or(u8::MAX))
        })
        .collect()
}

fn pair(our: &PoolCard, their: &PoolCard, remote_pool: u8) -> Result<Pairing, LayoutMismatch> {
    let (ours, theirs) = (&our.layout, &their.layout);
    let compare = |field: &str, a: String, b: String| {
        if a == b {
            return Ok(());
        }
        Err(LayoutMismatch { pool: ours.name.clone(), field: field.to_owned(), ours: a, theirs: b })
    };
    compare("dtype", format!("{:?}", ours.dtype), format!("{:?}", theirs.dtype))?;
    compare("planes", format!("{:?}", ours.planes), format!("{:?}", theirs.planes))?;
    compare("page_tokens", ours.page_tokens.to_string(), theirs.page_tokens.to_string())?;
    compare("head_bytes", ours.head_bytes.to_string(), theirs.head_bytes.to_string())?;
    compare("total_heads", ours.total_heads.to_string(), theirs.total_heads.to_string())?;
    compare("order", format!("{:?}", ours.order), format!("{:?}", theirs.order))?;

    let both = |a: &Range<u32>, b: &Range<u32>| a.start.max(b.start)..a.end.min(b.end);
    let layers = both(&ours.layers, &theirs.layers);
    let heads = both(&ours.heads, &theirs.heads);
    let shared = !layers.is_empty() && !heads.is_empty();
    let heads = if heads.is_empty() { ours.heads.start..ours.heads.start } else { heads };
    let (local, remote) = if shared {
        (ours.slice(&heads), theirs.slice(&heads))
    } else {
        let none = PageSlice { offset: 0, row_bytes: 0, stride: 0, rows: 0 };
        (none, none)
    };
    Ok(Pairing {
        remote_pool,
        layers: if shared { layers } else { ours.layers.start..ours.layers.start },
        first_layer: ours.layers.start,
        planes: ours.planes.count(),
        local,
        remote,
        remote_pages: theirs.pages,
        remote_stride: their.page_stride,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kv(layers: Range<u32>, heads: Range<u32>, order: HeadOrder) -> PoolCard {
        let layout = PoolLayout {
            name: "kv".to_owned(),
            layers,
            planes: Planes::KeyValue,
            pages: 100,
            page_tokens: 16,
            dtype: Dtype::Bf16,
            total_heads: 8,
            heads,
            head_bytes: 256,
            order,
        };
        let page_stride = layout.page_bytes();
        PoolCard { layout, page_stride }
    }

    #[test]
    fn a_mismatch_names_the_field_and_both_values() {
        let ours = kv(0..4, 0..8, HeadOrder::TokenMajor);
        let mut theirs = ours.clone();
        theirs.layout.page_tokens = 64;
        let error =
            pair_all(std::slice::from_ref(&ours), std::slice::from_ref(&theirs)).unwrap_err();
        assert_eq!(
            (error.field.as_str(), error.ours.as_str(), error.theirs.as_str()),
            ("page_tokens", "16", "64")
        );

        theirs = ours.clone();
        theirs.layout.dtype = Dtype::Fp8E4m3;
        let error =
            pair_all(std::slice::from_ref(&ours), std::slice::from_ref(&theirs)).unwrap_err();
        assert_eq!(
            (error.field.as_str(), error.ours.as_str(), error.theirs.as_str()),
            ("dtype", "Bf16", "Fp8E4m3")
        );
    }

    #[test]
    fn a_pool_that_only_one_side_has_is_refused_from_both_sides() {
        let kv = kv(0..4, 0..8, HeadOrder::TokenMajor);
        let state = PoolCard { layout: PoolLayout::opaque("mamba", 0..4, 8, 64), page_stride: 64 };
        let more = [kv.clone(), state];
        let fewer = [kv];
        assert_eq!(pair_all(&more, &fewer).unwrap_err().pool, "mamba");
        assert_eq!(pair_all(&fewer, &more).unwrap_err().ours, "absent");
    }

    #[test]
    fn unequal_tensor_parallel_ranks_get_the_head_strips_they_share() {
        let whole = kv(0..4, 0..8, HeadOrder::TokenMajor);
        let half = kv(0..4, 4..8, HeadOrder::TokenMajor);
        let from_whole =
            &pair_all(std::slice::from_ref(&whole), std::slice::from_ref(&half)).unwrap()[0];
        assert_eq!(
            from_whole.local,
            PageSlice { offset: 4 * 256, row_bytes: 4 * 256, stride: 8 * 256, rows: 16 }
        );
        assert_eq!(from_whole.remote.rows, 1);
        assert_eq!(from_whole.local.bytes(), from_whole.remote.bytes());
        let from_half =
            &pair_all(std::slice::from_ref(&half), std::slice::from_ref(&whole)).unwrap()[0];
        assert_eq!((from_half.local, from_half.remote), (from_whole.remote, from_whole.local));
    }

    #[test]
    fn a_head_slice_of_a_head_major_page_is_one_strip() {
        let whole = kv(0..4, 0..8, HeadOrder::HeadMajor);
        let half = kv(0..4, 2..4, HeadOrder::HeadMajor);
        let pairing =
            &pair_all(std::slice::from_ref(&whole), std::slice::from_ref(&half)).unwrap()[0];
        assert_eq!(
            pairing.local,
            PageSlice {
                offset: 2 * 16 * 256,
                row_bytes: 2 * 16 * 256,
                stride: 2 * 16 * 256,
                rows: 1
            }
        );
    }

    #[test]
    fn pipeline_ranks_share_the_layers_both_hold_and_may_share_none() {
        let front = kv(0..4, 0..8, HeadOrder::TokenMajor);
        let back = kv(4..8, 0..8, HeadOrder::TokenMajor);
        let all = kv(0..8, 0..8, HeadOrder::TokenMajor);
        let pairing = |a: &PoolCard, b: &PoolCard| {
            pair_all(std::slice::from_ref(a), std::slice::from_ref(b)).unwrap().remove(0)
        };
        assert_eq!(pairing(&back, &all).layers, 4..8);
        assert!(pairing(&front, &back).layers.is_empty());
    }

    #[test]
    fn a_layout_out_of_range_is_refused_naming_the_field() {
        let good = kv(0..4, 0..8, HeadOrder::TokenMajor).layout;
        assert!(good.validate().is_ok());
        let field = |layout: PoolLayout| match layout.validate().unwrap_err() {
            LayoutError::Field { field, .. } => field,
            other => panic!("{other}"),
        };
        assert_eq!(field(PoolLayout { name: String::new(), ..good.clone() }), "name");
        assert_eq!(field(PoolLayout { layers: 4..4, ..good.clone() }), "layers");
        assert_eq!(field(PoolLayout { layers: 0..5000, ..good.clone() }), "layers");
        assert_eq!(field(PoolLayout { heads: 0..9, ..good.clone() }), "heads");
        assert_eq!(field(PoolLayout { pages: 0, ..good.clone() }), "pages");
        assert_eq!(
            field(PoolLayout { page_tokens: u32::MAX, head_bytes: u32::MAX, ..good }),
            "page bytes"
        );
    }
}
