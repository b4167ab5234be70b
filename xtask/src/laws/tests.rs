mod apart;
mod floors;
mod layers;
mod list;
mod modules;
mod prose;
mod rings;
mod sizes;
mod sources;
mod tree;

use std::collections::BTreeSet;
use std::path::Path;

use cargo_metadata::{Dependency, DependencyKind, MetadataCommand};

use super::*;
use list::{Known, UPDATE, Violation, judge, parse, update, write};
use sources::Sources;

const LIST: &str = "xtask/laws.toml";
/// `update` shortens the list, `grow` also adds to it what is new and larger.
const ACTION: &str = "FAIRLEAD_LAWS";

#[test]
fn the_house_keeps_its_laws() {
    let found = violations().unwrap();
    let known = parse(&read(LIST).unwrap()).unwrap();
    if let Ok(action) = std::env::var(ACTION) {
        assert!(action == "update" || action == "grow", "{ACTION} is 'update' or 'grow'");
        std::fs::write(root().join(LIST), write(&update(&found, &known, action == "grow"))).unwrap();
    }
    let mut wrong = judge(&found, &parse(&read(LIST).unwrap()).unwrap());
    let texts = production_texts(&tracked().unwrap()).unwrap();
    wrong.extend(texts.iter().flat_map(|(path, text)| prose::nameless(path, text)));
    assert!(
        wrong.is_empty(),
        "{} violations of the laws in ARCHITECTURE.md:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

fn violations() -> Result<Vec<Violation>, String> {
    let tracked = tracked()?;
    let crates = sources::by_crate(&tracked)?;
    let places = floors::parse(&read("ARCHITECTURE.md")?);
    let dependencies = dependencies()?;
    let mut found = floors::violations(&places, &dependencies);
    found.extend(apart::violations(apart::APART, &dependencies));
    found.extend(rings::violations(&crates));
    found.extend(layers::violations(&crates));
    found.extend(sizes::items(&crates));
    let texts = production_texts(&tracked)?;
    let texts = texts.iter().map(|(path, text)| (path.as_str(), text.as_str()));
    found.extend(sizes::crates(&lines_by_crate(texts)));
    let bytes = |path: &String| std::fs::metadata(root().join(path)).map_or(0, |file| file.len());
    found.extend(tree::files(tracked.iter().map(|path| (path.as_str(), bytes(path)))));
    let written = tracked.iter().filter(|path| tree::is_source(path));
    let lengths: Vec<(&str, usize)> = written
        .map(|path| Ok((path.as_str(), read(path)?.lines().count())))
        .collect::<Result<_, String>>()?;
    found.extend(tree::lines(lengths));
    for path in tracked.iter().filter(|path| is_laid_out(path)) {
        found.extend(tree::layout(path, &sources::parse(path, &read(path)?)?));
    }
    Ok(found)
}

/// Sources of the workspace outside of integration tests, whose common modules may be `mod.rs`.
fn is_laid_out(path: &str) -> bool {
    let place = path.split_once("/src/").map(|(directory, _)| directory);
    let is_member = |directory: &str| {
        let parts = directory.split('/').count();
        parts == 2 && (directory.starts_with("crates/") || directory.starts_with("testbed/"))
            || directory == "xtask"
    };
    path.ends_with(".rs") && place.is_some_and(is_member)
}

/// Production sources with their paths.
fn production_texts(tracked: &[String]) -> Result<Vec<(String, String)>, String> {
    let paths = tracked.iter().filter(|path| production_crate(path).is_some());
    paths.map(|path| Ok((path.clone(), read(path)?))).collect()
}

/// Normal and build dependencies of the workspace's crates: on one another by directory, on those of others by name.
fn dependencies() -> Result<BTreeMap<String, BTreeSet<String>>, String> {
    let metadata = MetadataCommand::new().current_dir(root()).no_deps().exec();
    let metadata = metadata.map_err(|error| format!("cannot read the workspace: {error}"))?;
    let directory =
        |path: &Path| path.strip_prefix(root()).map(|path| path.display().to_string()).unwrap_or_default();
    let mut dependencies: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in &metadata.packages {
        let used = package.dependencies.iter().filter(|it| it.kind != DependencyKind::Development);
        let name =
            |it: &Dependency| it.path.as_ref().map_or(it.name.clone(), |path| directory(path.as_std_path()));
        let used = used.map(name).collect();
        let manifest = package.manifest_path.as_std_path();
        dependencies.insert(manifest.parent().map(directory).unwrap_or_default(), used);
    }
    Ok(dependencies)
}

fn parsed(files: &[(&str, &str)]) -> Sources {
    files.iter().map(|(path, text)| ((*path).to_owned(), sources::parse(path, text).unwrap())).collect()
}

fn subjects(found: Vec<Violation>) -> Vec<(String, usize)> {
    found.into_iter().map(|it| (it.subject, it.figure)).collect()
}

fn violation(subject: &str, figure: usize) -> Violation {
    Violation { law: "files", subject: subject.to_owned(), figure, advice: "at most 1: split it".to_owned() }
}

#[test]
fn a_list_is_read_as_it_was_written() {
    let known = Known::from([
        (("files".to_owned(), "a \"b\"".to_owned()), 7),
        (("rings".to_owned(), "crates/x".to_owned()), 1),
    ]);
    assert_eq!(parse(&write(&known)), Ok(known));
    assert!(parse("[files]\n\"a\" 7").unwrap_err().contains("'\"a\" 7'"));
    assert!(parse("[files]\n\"a\" = 7\n\"a\" = 8").unwrap_err().contains("twice"));
}

#[test]
fn what_is_not_listed_or_grew_fails_and_so_does_an_entry_that_is_too_large() {
    let known = parse("[files]\n\"same\" = 5\n\"grew\" = 5\n\"shrank\" = 5\n\"gone\" = 5").unwrap();
    let found = [violation("same", 5), violation("grew", 6), violation("shrank", 4), violation("new", 9)];
    assert_eq!(
        judge(&found, &known),
        [
            "files: grew grew from 5 to 6: at most 1: split it".to_owned(),
            format!("files: shrank has 4 now and is listed with 5: {UPDATE}"),
            "files: new has 9: at most 1: split it".to_owned(),
            format!("files: gone is listed and violates no more: {UPDATE}"),
        ]
    );
    let shorter = update(&found, &known, false);
    assert_eq!(shorter, parse("[files]\n\"same\" = 5\n\"grew\" = 5\n\"shrank\" = 4").unwrap());
    assert_eq!(judge(&found, &update(&found, &known, true)), Vec::<String>::new());
}

#[test]
fn a_ring_is_found_through_reexports_imports_and_macros_and_not_in_tests() {
    let files = |last: &str| {
        parsed(&[
            (
                "crates/x/src/lib.rs",
                "mod a; mod b; mod c; mod d; pub use d::D; #[cfg(test)] mod t { use crate::a::A; }",
            ),
            ("crates/x/src/a.rs", "use crate::b::{self, inner}; pub struct A; fn f() { b::inner::call() }"),
            ("crates/x/src/b.rs", "pub mod inner; pub use super::c::C;"),
            ("crates/x/src/b/inner.rs", "use super::C; pub fn call() {}"),
            ("crates/x/src/c.rs", "use super::*; pub struct C; fn f() { assert!(matches!(1, D::X)) }"),
            ("crates/x/src/d.rs", last),
        ])
    };
    let ring = rings::rings(&files("pub struct D; fn f(_: super::a::A) {}"));
    let names = ["a.rs", "b/inner.rs", "c.rs", "d.rs"].map(|name| format!("crates/x/src/{name}"));
    assert_eq!(ring, [BTreeSet::from(names)]);
    let crates = BTreeMap::from([("crates/x".to_owned(), files("pub struct D; fn f(_: super::a::A) {}"))]);
    assert_eq!(subjects(rings::violations(&crates)), [("crates/x".to_owned(), 4)]);
    assert_eq!(rings::rings(&files("pub struct D; #[cfg(test)] fn f(_: super::a::A) {}")), []);
    // Three files may use one another.
    assert_eq!(rings::rings(&files("pub struct D; fn f(_: super::b::C) {}")), []);
}

#[test]
fn an_arrow_to_a_higher_layer_is_found() {
    let files = |model: &str| {
        let files = parsed(&[
            ("crates/mesh/src/lib.rs", "mod model; mod plan; mod run; pub use plan::desired::Desired;"),
            ("crates/mesh/src/model.rs", "pub mod inputs;"),
            ("crates/mesh/src/model/inputs.rs", model),
            ("crates/mesh/src/plan.rs", "pub mod desired;"),
            (
                "crates/mesh/src/plan/desired.rs",
                "use crate::model::inputs::Inputs; pub struct Desired(Inputs);",
            ),
            ("crates/mesh/src/run.rs", "pub struct Run(crate::Desired);"),
        ]);
        subjects(layers::violations(&BTreeMap::from([("crates/mesh".to_owned(), files)])))
    };
    assert_eq!(files("pub struct Inputs;"), []);
    let arrow = |target: &str| format!("crates/mesh/src/model/inputs.rs -> crates/mesh/src/{target}");
    assert_eq!(files("pub struct Inputs(crate::Desired);"), [(arrow("plan/desired.rs"), 1)]);
    assert_eq!(files("pub struct Inputs(crate::run::Run);"), [(arrow("run.rs"), 1)]);
}

#[test]
fn long_functions_and_wide_structs_are_found_and_lists_are_not() {
    let lines = |count: usize| "    call();\n".repeat(count);
    let arms = "    1 => 1,\n".repeat(70);
    let text = format!(
        "fn short() {{\n{short}}}\nimpl X<u8> {{\n  fn long() {{\n{long}  }}\n}}\n\
         fn arms(x: u8) -> u8 {{\n  match x {{\n{arms}  }}\n}}\nfn list() -> Vec<u8> {{\n  vec![\n{elements}  ]\n}}\n\
         fn arm(x: u8) {{\n  match x {{\n    1 => {{\n{long}    }}\n  }}\n}}\n#[cfg(test)]\nfn test() {{\n{long}}}\n",
        short = lines(58),
        long = lines(60),
        elements = "    1,\n".repeat(70),
    );
    let wide = |before: &str, name: &str, kind: &str| {
        let fields: String = (0..16).map(|number| format!("f{number}: {kind}, ")).collect();
        format!("{before} struct {name} {{ {fields} }}\n")
    };
    let structs = [
        wide("", "Wide", "u8"),
        wide("#[derive(Debug, clap::Parser)]", "Arguments", "u8"),
        wide("", "Metrics", "Option<Family<Reason, Counter>>"),
    ];
    let text = text + &structs.concat();
    let found = |directory: &str| {
        let crates = BTreeMap::from([(directory.to_owned(), parsed(&[("x.rs", &text)]))]);
        subjects(sizes::items(&crates))
    };
    let functions = [("x.rs: X::long".to_owned(), 62), ("x.rs: arm".to_owned(), 62)];
    let all = [("x.rs: Wide".to_owned(), 16)].into_iter().chain(functions.clone());
    assert_eq!(found("crates/x"), all.collect::<Vec<_>>());
    assert_eq!(found("crates/api"), functions);
}

#[test]
fn a_large_crate_is_found() {
    let lines = [("crates/a", 12_500), ("crates/b", 12_501), ("crates/mesh", 10_001)];
    let lines = BTreeMap::from(lines.map(|(name, lines)| (name.to_owned(), lines)));
    let found = [("crates/b".to_owned(), 12_501), ("crates/mesh".to_owned(), 10_001)];
    assert_eq!(subjects(sizes::crates(&lines)), found);
}

#[test]
fn doc_comments_that_name_nothing_first_are_found() {
    let text = "//! What is here.\n\n/// Of the pod.\nuid: String,\n/// UID\n/// Of the pod.\nuid: String,\n\
                /// Offset.\n// Who knows.\n#[cfg(test)]\nmod tests {\n    /// Its name.\n}\n";
    let place = |number: u8, line: &str| format!("prose: a.rs:{number}: name the thing first: {line}");
    assert_eq!(prose::nameless("a.rs", text), [place(1, "//! What is here."), place(3, "/// Of the pod.")]);
}

#[test]
fn large_files_and_unknown_kinds_are_found() {
    let files = [
        ("crates/x/src/lib.rs", 262_144),
        ("docs/large.md", 262_145),
        ("fuzz/corpus/x/any-input", 9),
        ("pillow-13.0.0-cp311.whl", 9),
        ("deploy/secret", 9),
    ];
    let expected = [("docs/large.md", 262_145), ("pillow-13.0.0-cp311.whl", 1), ("deploy/secret", 1)];
    assert_eq!(subjects(tree::files(files)), expected.map(|(name, figure)| (name.to_owned(), figure)));
}

#[test]
fn sources_with_too_many_lines_are_found_and_other_files_have_no_such_bound() {
    let sources = [("crates/x/src/lib.rs", 500), ("crates/x/tests/integration/y.rs", 501), ("x.c", 818)];
    let expected = [("crates/x/tests/integration/y.rs", 501), ("x.c", 818)];
    assert_eq!(subjects(tree::lines(sources)), expected.map(|(name, figure)| (name.to_owned(), figure)));
    for (path, is_source) in
        [("a/b.rs", true), ("bpf/layout.h", true), ("docs/mesh.md", false), ("deploy/crds/x.yaml", false)]
    {
        assert_eq!(tree::is_source(path), is_source, "{path}");
    }
}

#[test]
fn modules_and_tests_in_other_places_are_found() {
    let found =
        |path: &str, text: &str| subjects(tree::layout(path, &sources::parse(path, text).unwrap())).len();
    assert_eq!(found("crates/x/src/a.rs", "mod b; fn f() {} #[cfg(test)] mod tests { fn f() {} }"), 0);
    assert_eq!(found("crates/x/src/a.rs", "#[cfg(test)] mod tests; fn f() {}"), 0);
    for wrong in [
        "#[cfg(test)] mod tests { fn f() {} } fn f() {}",
        "#[cfg(test)] mod unit {}",
        "#[cfg(test)] mod a_tests;",
        "#[cfg(test)] #[path = \"a_tests.rs\"] mod tests;",
    ] {
        assert_eq!(found("crates/x/src/a.rs", wrong), 1, "{wrong}");
    }
    assert_eq!(found("crates/x/src/a/mod.rs", "fn f() {}"), 1);
}

#[test]
fn lines_after_the_first_test_module_and_test_files_do_not_count() {
    let text =
        "fn a() {}\n#[cfg(test)]\nfn b() {}\n#[cfg(test)]\n#[path = \"x\"]\npub(crate) mod tests {\n}\n";
    assert_eq!(production_lines(text), 3);
    assert_eq!(production_lines("fn a() {}\nfn b() {}\n"), 2);
    let sources =
        [("crates/a/src/lib.rs", text), ("crates/a/src/b/tests.rs", text), ("crates/a/tests/c.rs", text)];
    assert_eq!(lines_by_crate(sources), BTreeMap::from([("crates/a".to_owned(), 3)]));
}

const TABLE: &str = "# A\n```\nprograms    crates/a   what uses crates/z\n            more of it\n            crates/b   it\n\
                     values      crates/c\n\nbeds        testbed/d\n            xtask\n```\n";

fn arrows_of(arrows: &[(&str, &str)]) -> BTreeMap<String, BTreeSet<String>> {
    let crates = ["crates/a", "crates/b", "crates/c", "testbed/d", "xtask"];
    let of = |name: &str| arrows.iter().filter(|it| it.0 == name).map(|it| it.1.to_owned()).collect();
    crates.iter().map(|name| ((*name).to_owned(), of(name))).collect()
}

#[test]
fn the_table_is_read() {
    let places = floors::parse(TABLE);
    let expected = [
        ("crates/a", floors::Place::Floor(1)),
        ("crates/b", floors::Place::Floor(1)),
        ("crates/c", floors::Place::Floor(2)),
        ("testbed/d", floors::Place::Beside),
        ("xtask", floors::Place::Beside),
    ];
    assert_eq!(places, BTreeMap::from(expected.map(|(name, place)| (name.to_owned(), place))));
}

#[test]
fn arrows_beside_and_up_and_crates_without_a_floor_are_found() {
    let arrows = [("crates/a", "crates/c"), ("testbed/d", "crates/a"), ("testbed/d", "xtask")];
    let places = floors::parse(TABLE);
    assert_eq!(floors::violations(&places, &arrows_of(&arrows)), []);
    let arrows = [("crates/a", "crates/b"), ("crates/c", "crates/a"), ("crates/c", "testbed/d")];
    let mut wrong = arrows_of(&arrows);
    wrong.remove("xtask");
    wrong.insert("crates/new".to_owned(), BTreeSet::new());
    let found: Vec<String> = floors::violations(&places, &wrong).into_iter().map(|it| it.subject).collect();
    let arrows = arrows.map(|(user, used)| format!("{user} -> {used}"));
    let expected = ["crates/new".to_owned(), "xtask".to_owned()].into_iter().chain(arrows);
    assert_eq!(found, expected.collect::<Vec<_>>());
}

#[test]
fn what_a_crate_must_not_link_is_found_with_the_way_to_it() {
    let arrows =
        [("crates/a", "crates/b"), ("crates/b", "crates/c"), ("crates/c", "other"), ("xtask", "crates/c")];
    let found = |apart: &[(&str, &[&str])]| subjects(apart::violations(apart, &arrows_of(&arrows)));
    let way = "crates/a -> crates/b -> crates/c";
    let expected = [(way.to_owned(), 1), (format!("{way} -> other"), 1)];
    assert_eq!(found(&[("crates/a", &["crates/c", "other", "xtask"])]), expected);
    assert_eq!(found(&[("crates/c", &["crates/a", "crates/b", "xtask"])]), []);
}
