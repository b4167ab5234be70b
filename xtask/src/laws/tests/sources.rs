//! Production sources, parsed.

use std::collections::BTreeMap;

use syn::visit::{self, Visit};
use syn::{Attribute, File, ImplItem, Item, TraitItem};

use crate::laws::{production_crate, read};

/// Parsed sources of one crate, by path.
pub(super) type Sources = BTreeMap<String, File>;

/// Parses the production sources among `paths`, by directory of the crate. A file that only tests use has an attribute where its module is
/// declared, so nothing here leads to it.
pub(super) fn by_crate(paths: &[String]) -> Result<BTreeMap<String, Sources>, String> {
    let mut crates: BTreeMap<String, Sources> = BTreeMap::new();
    for path in paths {
        if let Some(directory) = production_crate(path) {
            let file = parse(path, &read(path)?)?;
            crates.entry(directory.to_owned()).or_default().insert(path.clone(), file);
        }
    }
    Ok(crates)
}

pub(super) fn parse(path: &str, text: &str) -> Result<File, String> {
    syn::parse_file(text)
        .map_err(|error| format!("cannot parse {path}:{}: {error}", error.span().start().line))
}

/// Whether an item is compiled only for tests.
pub(super) fn is_test(attributes: &[Attribute]) -> bool {
    let is_cfg_test = |attribute: &Attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Path>().is_ok_and(|condition| condition.is_ident("test"))
    };
    attributes.iter().any(is_cfg_test)
}

/// Attributes of an item.
pub(super) fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(it) => &it.attrs,
        Item::Enum(it) => &it.attrs,
        Item::Fn(it) => &it.attrs,
        Item::Impl(it) => &it.attrs,
        Item::Mod(it) => &it.attrs,
        Item::Static(it) => &it.attrs,
        Item::Struct(it) => &it.attrs,
        Item::Trait(it) => &it.attrs,
        Item::Type(it) => &it.attrs,
        Item::Use(it) => &it.attrs,
        _ => &[],
    }
}

/// Visits production code only: nothing that is compiled for tests, and no attribute.
pub(super) struct Production<V>(pub(super) V);

/// Visitor of production code.
pub(super) trait Reader {
    /// An item, before what is in it; `false` leaves out what is in it.
    fn item(&mut self, item: &Item) -> bool;
    /// A path in a type, a pattern or an expression.
    fn path(&mut self, _path: &syn::Path) {}
    /// Paths among the tokens of a macro.
    fn macro_call(&mut self, _call: &syn::Macro) {}
}

impl<'ast, V: Reader> Visit<'ast> for Production<V> {
    fn visit_attribute(&mut self, _: &'ast Attribute) {}

    fn visit_item(&mut self, item: &'ast Item) {
        if !is_test(attributes(item)) && self.0.item(item) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        if !matches!(item, ImplItem::Fn(function) if is_test(&function.attrs)) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_trait_item(&mut self, item: &'ast TraitItem) {
        if !matches!(item, TraitItem::Fn(function) if is_test(&function.attrs)) {
            visit::visit_trait_item(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.0.path(path);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.0.macro_call(call);
        visit::visit_macro(self, call);
    }
}
