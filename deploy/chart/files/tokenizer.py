# Fetches the model's tokenizer.json for Foretell: whole or not at all.
import os, shutil, urllib.request
folder, hub = "/tokenizer", os.environ.get("HF_ENDPOINT", "https://huggingface.co")
request = urllib.request.Request(f"{hub}/@MODEL@/resolve/@REVISION@/tokenizer.json")
if os.environ.get("HF_TOKEN"):
    # Not for the store that the hub sends us on to.
    request.add_unredirected_header("authorization", "Bearer " + os.environ["HF_TOKEN"])
with urllib.request.urlopen(request, timeout=60) as answer, open(f"{folder}/part", "wb") as file:
    shutil.copyfileobj(answer, file)
os.rename(f"{folder}/part", f"{folder}/tokenizer.json")
