//! Modules of a crate: what each defines and imports, and which file defines what a path names.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::Visit as _;
use syn::{Item, UseTree};

use super::sources::{Production, Reader, Sources, is_test};

/// Number of imports that are followed from a name to its definition.
const DEPTH: usize = 16;

/// By file, the files that define what it uses, without itself, and the last names of the paths that lead there.
pub(super) type Arrows<'a> = BTreeMap<&'a str, BTreeMap<&'a str, BTreeSet<&'a str>>>;

/// Modules of one crate; a program and a library have a root each.
#[derive(Debug, Default)]
pub(super) struct Modules(Vec<Module>);

#[derive(Debug, Default)]
struct Module {
    path: String,
    parent: Option<usize>,
    children: BTreeMap<String, usize>,
    definitions: BTreeSet<String>,
    imports: BTreeMap<String, Vec<String>>,
    globs: Vec<Vec<String>>,
    /// Paths in its code and its imports, apart from re-exports.
    uses: Vec<Vec<String>>,
}

#[derive(Debug, Clone, Copy)]
enum Target {
    Item(usize),
    Module(usize),
}

impl Modules {
    pub(super) fn of(sources: &Sources) -> Self {
        let mut modules = Self::default();
        for (path, file) in sources {
            if let Some(directory) = path.strip_suffix("lib.rs").or_else(|| path.strip_suffix("main.rs"))
                && directory.ends_with("/src/")
            {
                modules.add(sources, None, path, directory, &file.items);
            }
        }
        modules
    }

    /// Adds a module; `directory` has the files of its children.
    fn add(
        &mut self,
        sources: &Sources,
        parent: Option<usize>,
        path: &str,
        directory: &str,
        items: &[Item],
    ) -> usize {
        let number = self.0.len();
        let mut module = Production(Module { path: path.to_owned(), parent, ..Module::default() });
        items.iter().for_each(|item| module.visit_item(item));
        self.0.push(module.0);
        for item in items {
            let Item::Mod(child) = item else { continue };
            if is_test(&child.attrs) {
                continue;
            }
            let name = child.ident.to_string();
            let directory = format!("{directory}{name}/");
            let files = [format!("{}.rs", directory.trim_end_matches('/')), format!("{directory}mod.rs")];
            let file = files.iter().find_map(|file| sources.get_key_value(file));
            let added = match (&child.content, file) {
                (Some((_, items)), _) => self.add(sources, Some(number), path, &directory, items),
                (None, Some((file, source))) => {
                    self.add(sources, Some(number), file, &directory, &source.items)
                }
                (None, None) => continue,
            };
            self.0[number].children.insert(name, added);
        }
        number
    }

    pub(super) fn arrows(&self) -> Arrows<'_> {
        let mut arrows = Arrows::new();
        for (number, module) in self.0.iter().enumerate() {
            let targets = arrows.entry(&module.path).or_default();
            for path in &module.uses {
                let Some(Target::Item(target)) = self.resolve(number, path, DEPTH) else { continue };
                let file = self.0[target].path.as_str();
                if file != module.path {
                    targets.entry(file).or_default().extend(path.last().map(String::as_str));
                }
            }
        }
        arrows
    }

    fn resolve(&self, from: usize, path: &[String], depth: usize) -> Option<Target> {
        let (first, rest) = path.split_first()?;
        let root = || std::iter::successors(Some(from), |module| self.0[*module].parent).last();
        let start = match first.as_str() {
            "crate" => Target::Module(root()?),
            "self" => Target::Module(from),
            "super" => Target::Module(self.0[from].parent?),
            name => self.lookup(from, name, depth)?,
        };
        rest.iter().try_fold(start, |target, name| match target {
            // A variant or an associated item.
            Target::Item(_) => Some(target),
            Target::Module(module) if name == "super" => self.0[module].parent.map(Target::Module),
            Target::Module(module) => self.lookup(module, name, depth),
        })
    }

    fn lookup(&self, number: usize, name: &str, depth: usize) -> Option<Target> {
        let depth = depth.checked_sub(1)?;
        let module = &self.0[number];
        if let Some(child) = module.children.get(name) {
            return Some(Target::Module(*child));
        }
        if module.definitions.contains(name) {
            return Some(Target::Item(number));
        }
        if let Some(path) = module.imports.get(name) {
            return self.resolve(number, path, depth);
        }
        module.globs.iter().find_map(|path| match self.resolve(number, path, depth)? {
            Target::Module(module) => self.lookup(module, name, depth),
            Target::Item(_) => None,
        })
    }
}

impl Module {
    fn import(&mut self, tree: &UseTree, path: &[String], is_reexport: bool) {
        let with = |name: String| [path, &[name]].concat();
        let (name, target) = match tree {
            UseTree::Path(it) => return self.import(&it.tree, &with(it.ident.to_string()), is_reexport),
            UseTree::Group(it) => {
                return it.items.iter().for_each(|tree| self.import(tree, path, is_reexport));
            }
            UseTree::Glob(_) => return self.globs.push(path.to_vec()),
            UseTree::Name(it) if it.ident == "self" => {
                (path.last().cloned().unwrap_or_default(), path.to_vec())
            }
            UseTree::Name(it) => (it.ident.to_string(), with(it.ident.to_string())),
            UseTree::Rename(it) => (it.rename.to_string(), with(it.ident.to_string())),
        };
        if !is_reexport {
            self.uses.push(target.clone());
        }
        self.imports.insert(name, target);
    }

    /// Paths in the arguments of a macro: what has `::`, or begins with a capital.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        let mut end = |path: &mut Vec<String>| {
            let path = std::mem::take(path);
            let is_type = |name: &String| name.starts_with(char::is_uppercase);
            if path.len() > 1 || path.first().is_some_and(is_type) {
                self.uses.push(path);
            }
        };
        let mut groups = Vec::new();
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    if colons != 2 {
                        end(&mut path);
                    }
                    path.push(name.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' && !path.is_empty() => colons += 1,
                TokenTree::Group(group) => {
                    end(&mut path);
                    groups.push(group.stream());
                }
                TokenTree::Literal(_) | TokenTree::Punct(_) => end(&mut path),
            }
        }
        end(&mut path);
        groups.into_iter().for_each(|group| self.tokens(group));
    }
}

impl Reader for Module {
    fn item(&mut self, item: &Item) -> bool {
        let name = match item {
            Item::Const(it) => &it.ident,
            Item::Enum(it) => &it.ident,
            Item::Fn(it) => &it.sig.ident,
            Item::Static(it) => &it.ident,
            Item::Struct(it) => &it.ident,
            Item::Trait(it) => &it.ident,
            Item::Type(it) => &it.ident,
            Item::Use(it) => {
                self.import(&it.tree, &[], !matches!(it.vis, syn::Visibility::Inherited));
                return false;
            }
            // A module of its own.
            Item::Mod(_) => return false,
            _ => return true,
        };
        self.definitions.insert(name.to_string());
        true
    }

    fn path(&mut self, path: &syn::Path) {
        if path.leading_colon.is_none() {
            self.uses.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        }
    }

    fn macro_call(&mut self, call: &syn::Macro) {
        self.tokens(call.tokens.clone());
    }
}
