//! Serializes maps whose keys are not strings as lists of pairs, since keys of JSON objects are
//! strings.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Writes a map as a list of pairs.
///
/// # Errors
/// Those of `serializer`.
pub fn serialize<'a, S, M, K, V>(map: &'a M, serializer: S) -> Result<S::Ok, S::Error>
where
    S: Serializer,
    &'a M: IntoIterator<Item = (&'a K, &'a V)>,
    K: Serialize + 'a,
    V: Serialize + 'a,
{
    serializer.collect_seq(map)
}

/// Reads a map from a list of pairs.
///
/// # Errors
/// Those of `deserializer`, and of a value that is no such list.
pub fn deserialize<'de, D, M, K, V>(deserializer: D) -> Result<M, D::Error>
where
    D: Deserializer<'de>,
    M: FromIterator<(K, V)> + IntoIterator<Item = (K, V)>,
    K: DeserializeOwned,
    V: DeserializeOwned,
{
    Ok(Vec::<(K, V)>::deserialize(deserializer)?.into_iter().collect())
}
