//! The lookup by which a watch cache finds a value that stands for a cluster-scoped object.

/// Implements [`kube::runtime::reflector::Lookup`] for a type that is kept instead of an object: the cache finds it by the kind
/// of that object and by its name.
#[macro_export]
macro_rules! cached_by_name {
    ($cached:ty, $object:ty, |$value:ident| $name:expr) => {
        impl kube::runtime::reflector::Lookup for $cached {
            type DynamicType = ();

            fn kind((): &()) -> std::borrow::Cow<'_, str> {
                <$object as kube::Resource>::kind(&())
            }

            fn group((): &()) -> std::borrow::Cow<'_, str> {
                <$object as kube::Resource>::group(&())
            }

            fn version((): &()) -> std::borrow::Cow<'_, str> {
                <$object as kube::Resource>::version(&())
            }

            fn plural((): &()) -> std::borrow::Cow<'_, str> {
                <$object as kube::Resource>::plural(&())
            }

            fn name(&self) -> Option<std::borrow::Cow<'_, str>> {
                let $value = self;
                Some(std::borrow::Cow::Borrowed($name))
            }

            fn namespace(&self) -> Option<std::borrow::Cow<'_, str>> {
                None
            }

            fn resource_version(&self) -> Option<std::borrow::Cow<'_, str>> {
                None
            }

            fn uid(&self) -> Option<std::borrow::Cow<'_, str>> {
                None
            }
        }
    };
}
