# Drains Foretell before the engine is stopped. Ends once no request is in flight.
import http.client, os, sys
headers, token = {}, "@TOKEN@"
if os.path.exists(token):
    headers["authorization"] = "Bearer " + open(token).read().strip()
admin = http.client.HTTPConnection("127.0.0.1", @PORT@, timeout=@SECONDS@)
admin.request("POST", "/api/drain?wait=1", headers=headers)
answer = admin.getresponse()
sys.exit(0 if answer.status == 200 else f"drain: {answer.status} {answer.read().decode()}")
