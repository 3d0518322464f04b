"""What the endpoints of llama-server look like, in one place, and pure.

`endpoints` says which route reaches how far into the slots; `shapes` where a body holds what becomes the
prompt; `canonical` what of a message is prompt; `reading` joins them into one value per request. `usage` is
what an answer says of its prompt, `errors` the words in which a caller is told of trouble, `as_chat` the chat
request that the server makes of other dialects, `opening` what two conversations share at their beginning.
"""
