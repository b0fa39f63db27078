# Fetches the model's tokenizer.json for Foretell. A partial file is never left under its name.
import os, shutil, urllib.request
folder, hub = "/tokenizer", os.environ.get("HF_ENDPOINT", "https://huggingface.co")
request = urllib.request.Request(f"{hub}/@MODEL@/resolve/@REVISION@/tokenizer.json")
if os.environ.get("HF_TOKEN"):
    # Not sent to the store that the hub redirects to.
    request.add_unredirected_header("authorization", "Bearer " + os.environ["HF_TOKEN"])
with urllib.request.urlopen(request, timeout=60) as answer, open(f"{folder}/part", "wb") as file:
    shutil.copyfileobj(answer, file)
os.rename(f"{folder}/part", f"{folder}/tokenizer.json")
