//! Sizes of crates, functions and structs.

use std::collections::BTreeMap;

use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{
    Block, Expr, Field, File, ImplItem, Item, ItemStruct, Macro, Signature, Stmt, Token, TraitItem, Type,
};

use super::list::Violation;
use super::sources::{Production, Reader, Sources, is_test};

const CRATE_LINES: usize = 12_500;
const MESH: (&str, usize) = ("crates/mesh", 10_000);
const FUNCTION_LINES: usize = 60;
const STRUCT_FIELDS: usize = 15;
/// Crate whose structs are those of the API: other programs say how many fields they have.
const API: &str = "crates/api";
/// Traits from which clap derives the arguments of a program.
const ARGUMENTS: [&str; 2] = ["Args", "Parser"];
/// A struct with such fields only registers and keeps metrics: it has a field for each of them.
const METRICS: [&str; 4] = ["Counter", "Family", "Gauge", "Histogram"];

pub(super) fn crates(lines: &BTreeMap<String, usize>) -> Vec<Violation> {
    let violation = |(directory, lines): (&String, &usize)| {
        let limit = if directory == MESH.0 { MESH.1 } else { CRATE_LINES };
        (*lines > limit).then(|| Violation {
            law: "crates",
            subject: directory.clone(),
            figure: *lines,
            advice: format!("production lines, at most {limit}: split the crate by subject"),
        })
    };
    lines.iter().filter_map(violation).collect()
}

/// Functions and structs that are too large.
pub(super) fn items(crates: &BTreeMap<String, Sources>) -> Vec<Violation> {
    let files = crates.iter().flat_map(|(directory, files)| files.iter().map(move |file| (directory, file)));
    files.flat_map(|(directory, (path, file))| of_file(path, file, directory != API)).collect()
}

fn of_file(path: &str, file: &File, with_structs: bool) -> Vec<Violation> {
    let sizes = Sizes { owner: String::new(), functions: Vec::new(), structs: Vec::new() };
    let mut sizes = Production(sizes);
    sizes.visit_file(file);
    let Sizes { functions, structs, .. } = sizes.0;
    let violation = |law, name: String, figure, advice| Violation {
        law,
        subject: format!("{path}: {name}"),
        figure,
        advice,
    };
    let functions = functions.into_iter().map(|(name, lines)| {
        let advice = format!("lines, at most {FUNCTION_LINES}: give its steps names");
        violation("functions", name, lines, advice)
    });
    let structs = structs.into_iter().filter(|_| with_structs).map(|(name, fields)| {
        let advice = format!("fields, at most {STRUCT_FIELDS}: those that change together are a type");
        violation("structs", name, fields, advice)
    });
    let mut all: Vec<Violation> = functions.chain(structs).collect();
    // Of functions with the same name the longest.
    all.sort_by(|a, b| (&a.subject, b.figure).cmp(&(&b.subject, a.figure)));
    all.dedup_by(|a, b| a.subject == b.subject);
    all
}

struct Sizes {
    /// Type or trait whose functions are read.
    owner: String,
    functions: Vec<(String, usize)>,
    structs: Vec<(String, usize)>,
}

impl Sizes {
    fn function(&mut self, signature: &Signature, block: &Block) {
        let length = length(signature, block);
        if length > FUNCTION_LINES {
            self.functions.push((format!("{}{}", self.owner, signature.ident), length));
        }
    }
}

impl Reader for Sizes {
    fn item(&mut self, item: &Item) -> bool {
        match item {
            Item::Fn(it) => self.function(&it.sig, &it.block),
            Item::Impl(it) => {
                self.owner = match &*it.self_ty {
                    Type::Path(path) => path.path.segments.last().map(|last| format!("{}::", last.ident)),
                    _ => None,
                }
                .unwrap_or_default();
                for item in &it.items {
                    if let ImplItem::Fn(function) = item
                        && !is_test(&function.attrs)
                    {
                        self.function(&function.sig, &function.block);
                    }
                }
                self.owner.clear();
            }
            Item::Struct(it) if it.fields.len() > STRUCT_FIELDS && !is_arguments(it) && !is_metrics(it) => {
                self.structs.push((it.ident.to_string(), it.fields.len()));
            }
            Item::Trait(it) => {
                for item in &it.items {
                    if let TraitItem::Fn(function) = item
                        && let Some(block) = &function.default
                    {
                        self.function(&function.sig, block);
                    }
                }
            }
            _ => {}
        }
        true
    }
}

/// Lines from the signature to the end; of a body that is a single `match` or list, of its longest arm or element.
fn length(signature: &Signature, block: &Block) -> usize {
    let whole = Some(lines_between(signature, block));
    let of_macro = |call: &Macro| {
        let elements = call.parse_body_with(Punctuated::<Expr, Token![,]>::parse_terminated);
        elements
            .ok()
            .filter(|_| call.path.is_ident("vec"))
            .and_then(|elements| elements.iter().map(lines).max())
    };
    let longest = match block.stmts.as_slice() {
        [Stmt::Expr(Expr::Array(list), None)] => list.elems.iter().map(lines).max(),
        [Stmt::Expr(Expr::Macro(call), None)] => of_macro(&call.mac),
        [Stmt::Expr(Expr::Match(it), None)] => it.arms.iter().map(lines).max(),
        [Stmt::Macro(call)] => of_macro(&call.mac),
        _ => None,
    };
    longest.or(whole).unwrap_or_default()
}

fn lines(node: &impl Spanned) -> usize {
    lines_between(node, node)
}

fn lines_between(first: &impl Spanned, last: &impl Spanned) -> usize {
    (last.span().end().line + 1).saturating_sub(first.span().start().line)
}

fn is_arguments(item: &ItemStruct) -> bool {
    let mut is_derived = false;
    for attribute in item.attrs.iter().filter(|attribute| attribute.path().is_ident("derive")) {
        // An attribute that cannot be read derives nothing.
        let _ = attribute.parse_nested_meta(|meta| {
            is_derived |=
                meta.path.segments.last().is_some_and(|last| ARGUMENTS.iter().any(|name| last.ident == name));
            Ok(())
        });
    }
    is_derived
}

/// Whether at least half of its fields are metrics.
fn is_metrics(item: &ItemStruct) -> bool {
    struct Names(bool);
    impl Visit<'_> for Names {
        fn visit_ident(&mut self, name: &syn::Ident) {
            self.0 |= METRICS.iter().any(|metric| name == metric);
        }
    }
    let is_metric = |field: &&Field| {
        let mut names = Names(false);
        visit::visit_type(&mut names, &field.ty);
        names.0
    };
    item.fields.iter().filter(is_metric).count() * 2 >= item.fields.len()
}
